"""Figures of links and speeds of ranks, fitted to the times that each rank measured.

Not for measuring these times: see worker.py.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from steelyard.ir.collective import GLOO, THROUGH_SLOTS, Exchange
from steelyard.measure.links.exchange_sizes import SIZES, ExchangeSizes
from steelyard.measure.links.link_figures import (
    ALMOST_ZERO,
    SKEW,
    SLOT_COLLECTIVES,
    SLOTS,
    speed_of,
)

# The measured speeds of ranks on equal cores differ by up to this share, because of other load on
# the machine.
ALIKE_SHARE = 0.15


def fitted(
    rank_figures: Sequence[Mapping[str, float]],
    *,
    sizes: ExchangeSizes = SIZES["cpu"],
    near: ExchangeSizes = SIZES["cpu"],
    each: int = 1,
) -> dict[str, float]:
    """Return figures fitted to the slowest rank's times.

    One line is fitted through the times of a small and two large all-reduces in a ring, and another
    through those of messages from one rank to the next. With ``each`` ranks per host, the
    all-reduces within a host have the sizes ``near``.
    """
    num_ranks, speeds = len(rank_figures), relative_speeds(rank_figures, each)
    timed = {name: max(one[name] for one in rank_figures) for name in rank_figures[0]}
    latency, rate = latency_and_rate(timed, num_ranks, sizes)
    hops = 2 * (num_ranks - 1)
    return {
        "latency": latency,
        "rate": rate,
        "call": max(timed["call"] / hops, ALMOST_ZERO),
        "disturbs": _largest_slowdown("disturbs", rank_figures, speeds),
        **_host_figures(timed, near, each),
        **(
            {"near disturbs": _largest_slowdown("near disturbs", rank_figures, speeds)}
            if each > 1
            else {}
        ),
        **_message_figures(timed, sizes),
        "hand disturbs": _largest_slowdown("hand disturbs", rank_figures, speeds),
        **_slot_figures(timed, sizes),
        **_slot_collective_figures(timed, num_ranks, sizes),
        **{speed_of(rank): speed for rank, speed in enumerate(speeds)},
        **_mean_waits(rank_figures),
    }


def latency_and_rate(
    timed: Mapping[str, float], num_ranks: int, sizes: ExchangeSizes
) -> tuple[float, float]:
    """Return the latency of a ring hop and the rate of the bytes that each rank sends."""
    small, middle, large = (
        GLOO.collective(Exchange.ALL_REDUCE, axis="", num_ranks=num_ranks, nbytes=nbytes)
        for nbytes in sizes
    )
    seconds = timed["large"] - timed["middle"]
    rate = (large.sent_bytes - middle.sent_bytes) / max(seconds, ALMOST_ZERO)
    latency = (timed["small"] - small.sent_bytes / rate) / small.hops
    return max(latency, ALMOST_ZERO), rate


def _largest_slowdown(
    name: str, rank_figures: Sequence[Mapping[str, float]], speeds: Sequence[float]
) -> float:
    """Return the largest slowdown of any rank, scaled to the speed of the fastest rank."""
    most = max(one[name] * speed for one, speed in zip(rank_figures, speeds, strict=True))
    return min(1.0, max(most, ALMOST_ZERO))


def _host_figures(timed: Mapping[str, float], sizes: ExchangeSizes, each: int) -> dict[str, float]:
    if "near small" not in timed:
        return {}
    seconds = {name: timed[f"near {name}"] for name in sizes._fields}
    latency, rate = latency_and_rate(seconds, each, sizes)
    return {"near": latency, "near rate": rate}


def _message_figures(timed: Mapping[str, float], sizes: ExchangeSizes) -> dict[str, float]:
    seconds = max(timed["hop middle"] - timed["hop small"], ALMOST_ZERO)
    rate = (sizes.middle - sizes.small) / seconds
    return {
        "hop": max(timed["hop small"] - sizes.small / rate, ALMOST_ZERO),
        "hand": max(timed["hand"], ALMOST_ZERO),
        "hand rate": rate,
    }


def _slot_figures(timed: Mapping[str, float], sizes: ExchangeSizes) -> dict[str, float]:
    """Return the figures of messages through slots; almost zero without shared memory.

    The CPU time of the two ranks for a message is not part of its transfer time.
    """
    if "slot small" not in timed:
        return dict.fromkeys(SLOTS, ALMOST_ZERO)
    seconds = max(timed["slot large"] - timed["slot small"], ALMOST_ZERO)
    return {
        "slot hop": max(timed["slot small"] - 2 * timed["slot hand"], ALMOST_ZERO),
        "slot rate": (sizes.middle - sizes.small) / seconds,
        "slot hand": max(timed["slot hand"], ALMOST_ZERO),
        **_copy_share(timed, seconds),
    }


def _copy_share(timed: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return the time of a message's local copy as a share of its transfer time to another host."""
    if "slot copy" not in timed:
        return {}
    return {"slot copied": max(timed["slot copy"] / seconds, ALMOST_ZERO)}


def _slot_collective_figures(
    timed: Mapping[str, float], num_ranks: int, sizes: ExchangeSizes
) -> dict[str, float]:
    if "slotted small" not in timed:
        return dict.fromkeys(SLOT_COLLECTIVES, ALMOST_ZERO)
    small, middle = (
        THROUGH_SLOTS.collective(Exchange.ALL_REDUCE, axis="", num_ranks=num_ranks, nbytes=nbytes)
        for nbytes in sizes[:2]
    )
    seconds = max(timed["slotted middle"] - timed["slotted small"], ALMOST_ZERO)
    call = timed["slotted call"] / small.hops
    return {
        "slotted call": max(call, ALMOST_ZERO),
        "slotted hop": max(timed["slotted small"] / small.hops - call, ALMOST_ZERO),
        "slotted rate": (middle.sent_bytes - small.sent_bytes) / seconds,
    }


def _mean_waits(rank_figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of the waits that the ranks measured; the last rank to arrive does not
    wait.
    """
    if any(name not in one for one in rank_figures for name in SKEW):
        return {}
    return {name: max(fmean(one[name] for one in rank_figures), ALMOST_ZERO) for name in SKEW}


def relative_speeds(rank_figures: Sequence[Mapping[str, float]], each: int) -> list[float]:
    """Return speeds relative to the fastest rank; differences that may be noise count as none.

    With several hosts, all ranks of a host get its best speed, because they disturb each other now
    and then.
    """
    products = [one["product"] for one in rank_figures]
    of_host = [min(products[n : n + each]) for n in range(0, len(products), each)]
    least = min(products)
    speeds = [least / of_host[rank // each] for rank in range(len(products))]
    return [1.0 if speed > 1 - ALIKE_SHARE else speed for speed in speeds]
