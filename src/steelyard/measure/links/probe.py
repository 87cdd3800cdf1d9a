"""Figures of the links between ranks and of the speed of each rank, measured and cached.

To measure ranks of this machine, processes are started, each on its share of the cores. Ranks of
several hosts measure when they meet, and ``fitted`` turns their results into figures. Not for the
measurements of one rank: see worker.py.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean

import torch

from steelyard.comm.devices import CPU
from steelyard.comm.shared_memory.remote_host import is_able
from steelyard.errors import BadInput, RunFailed
from steelyard.hardware.cluster import Link
from steelyard.hardware.host_os import cores_of
from steelyard.ir.collective import GLOO, THROUGH_SLOTS, Exchange
from steelyard.measure.cache import CostCache
from steelyard.measure.links.background_load import ALL_HOSTS
from steelyard.measure.links.host_pairs import (
    host_rates,
    latency_of,
    measure_host_links,
    name_of,
    pair_seconds,
    rate_of,
)
from steelyard.measure.links.worker import (
    ALMOST_ZERO,
    DOUBT,
    SECONDS,
    SIZES,
    ExchangeSizes,
    sizes_of,
)
from steelyard.predict.arrival_skew import Skew
from steelyard.predict.rank_subsets import best_joined

BETWEEN_HOSTS, BETWEEN_GPUS = "network between hosts", "between GPUs"
_FIGURES = ("latency", "rate", "call", "disturbs")
# Figures of messages from one rank to the next.
_MESSAGES = ("hop", "hand", "hand rate", "hand disturbs")
# Figures of messages through slots in shared memory.
_SLOTS = ("slot hop", "slot rate", "slot hand")
# Figures of collectives through slots in shared memory.
_SLOT_COLLECTIVES = ("slotted call", "slotted hop", "slotted rate")
# Figures for the ranks of one host, if there are several hosts.
_WITHIN_HOST = ("near", "near rate", "near disturbs")
# Arrival skew: the wait for the last rank, and the compute time before it. This is missing for GPUs
# and in older cache entries.
_SKEW = ("skew short", "skew short after", "skew long", "skew long after")
# For hosts: a hash of their names, and the link probe that detects a changed link.
_NAMES_KEY, _PROBE = "hosts", ("small look", "middle look")
# The measured speeds of ranks on equal cores differ by up to this share, because of other load on
# the machine.
ALIKE_SHARE = 0.15
# Figures of hosts that met in this process, in case the cache file is unusable.
_met_in_process: dict[str, dict[str, float]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """The links between ranks of a group, and the compute speed of each rank.

    ``link`` is for collectives and ``handing`` for messages from one rank to another. ``slotted``
    and ``slots`` are the same links through shared memory, if that is possible. ``near`` joins
    ranks of one host, if there are several hosts. ``speeds`` are relative to the fastest rank, and
    empty if the differences may be noise.
    """

    link: Link
    handing: Link
    near: Link | None
    speeds: tuple[float, ...]
    slots: Link | None
    slotted: Link | None
    skew: Skew | None
    # The best ranks for each smaller number of ranks, if they are not simply the first ones.
    subsets: Mapping[int, "Joined"] = field(default_factory=dict)
    # Bytes per second of each host's link, where known.
    host_rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A subset of the ranks, with its links if these are better than those of all ranks."""

    ranks: tuple[int, ...]
    link: Link | None = None
    handing: Link | None = None


def measured_ranks(
    num_ranks: int,
    *,
    hosts: int = 1,
    torch_device: torch.device = CPU,
    speeds: Sequence[float] = (),
    cache: CostCache | None = None,
) -> LinkMeasurement:
    """Return the links and speeds of ``num_ranks`` ranks, measured once and then cached.

    On one host, the ranks are started for the measurement; if ``torch_device`` is a GPU, each gets
    its own GPU. Ranks of several hosts must have met before. ``speeds`` override the measured ones.
    """
    context = context_of(num_ranks, hosts=hosts, torch_device=torch_device)
    found = cache.read_rates(context) if cache and hosts == 1 else {}
    if hosts > 1:
        if (measure_on_all_hosts := ALL_HOSTS.get()) is not None:
            measure_on_all_hosts(torch_device)
        # Figures of this process are valid even if the cache file has become unusable.
        found = _met_in_process.get(context, cache.read_rates(context) if cache else {})
        if not is_whole(found, num_ranks, hosts=hosts):
            each = num_ranks // hosts
            raise BadInput(
                f"this host has not measured its links to {hosts - 1} other "
                f"hosts{_gpu_suffix(torch_device)}",
                expected="hosts that have planned together for such a model",
                remedy=f"run on each host: torchrun --nnodes {hosts} --nproc-per-node {each} ... "
                "-m steelyard plan",
            )
    if not is_whole(found, num_ranks):
        found = fitted(
            _measure_local_ranks(num_ranks, torch_device), sizes=SIZES[torch_device.type]
        )
        if cache:
            # Another process may already have stored its figures.
            found = {**found, **cache.read_rates(context)}
            cache.write_rates(context, found)
    local_kind = "loopback" if torch_device.type == "cpu" else BETWEEN_GPUS
    measured = _to_measurement(found, num_ranks, kind=local_kind if hosts == 1 else BETWEEN_HOSTS)
    if speeds:
        found = {**found, **{_speed_of(rank): speed for rank, speed in enumerate(speeds)}}
    subsets = _subsets(found, num_ranks, hosts=hosts, sizes=sizes_of(torch_device, hosts))
    rates = host_rates(found, hosts) if hosts > 2 else []
    return replace(measured, subsets=subsets, host_rates=tuple(rates))


def is_whole(found: Mapping[str, float], num_ranks: int, *, hosts: int = 1) -> bool:
    """True if the cached figures are complete."""
    host_keys = _WITHIN_HOST if 1 < hosts < num_ranks else ()
    speeds_of = map(_speed_of, range(num_ranks))
    return found.keys() >= {
        *_FIGURES,
        *_MESSAGES,
        *_SLOTS,
        *_SLOT_COLLECTIVES,
        *host_keys,
        *speeds_of,
    }


def remember_hosts(
    rank_figures: Sequence[Mapping[str, float]],
    names: Sequence[str],
    *,
    hosts: int,
    torch_device: torch.device = CPU,
    session: Sequence[float],
    joins: Mapping[str, float] | None = None,
    cache: CostCache,
) -> None:
    """Store the figures of ranks that met, whose hosts have these ``names``.

    ``session`` is the link probe with which their next meeting is compared. ``joins`` are figures
    of pairs and subsets of the hosts. Each subset that a plan may use is also stored, as if these
    hosts had met alone.
    """
    context = context_of(len(names), hosts=hosts, torch_device=torch_device)
    link_probe = dict(zip(_PROBE, session, strict=True))
    host_sizes, each = SIZES[torch_device.type], len(names) // hosts
    figures = fitted(rank_figures, sizes=sizes_of(torch_device, hosts), near=host_sizes, each=each)
    found = {**figures, **(joins or {}), **link_probe, _NAMES_KEY: _names_hash(names)}
    _met_in_process[context] = found
    cache.write_rates(context, found)
    for members in _groups(found, hosts, each).values():
        subset_found = _subset_figures(
            found, members, names, each=each, sizes=sizes_of(torch_device, hosts)
        )
        context = context_of(len(members) * each, hosts=len(members), torch_device=torch_device)
        _met_in_process[context] = subset_found
        cache.write_rates(context, subset_found)


def measured_joins(
    rank_figures: Sequence[Mapping[str, float]], *, hosts: int, torch_device: torch.device = CPU
) -> dict[str, float]:
    """Return figures of host pairs and of the best-connected subsets; all ranks must call this."""
    each = len(rank_figures) // hosts
    return measure_host_links(
        _speeds(rank_figures, each)[::each], each=each, sizes=sizes_of(torch_device, hosts)
    )


def _groups(found: Mapping[str, float], hosts: int, each: int) -> Mapping[int, tuple[int, ...]]:
    """Return the best subset of each size from two to all but one; empty if no pairs were timed."""
    if hosts < 3 or rate_of(0, 1) not in found:
        return {}
    speeds = [found[_speed_of(host * each)] for host in range(hosts)]
    groups = best_joined(pair_seconds(found, hosts), speeds)
    return {number: groups[number] for number in range(2, hosts)}


def _subsets(
    found: Mapping[str, float], num_ranks: int, *, hosts: int, sizes: ExchangeSizes
) -> dict[int, Joined]:
    if hosts == 1:
        # All pairs of ranks of one machine count as equally fast.
        level = [[1.0] * num_ranks for _ in range(num_ranks)]
        groups = best_joined(level, [found[_speed_of(rank)] for rank in range(num_ranks)])
        return {
            number: Joined(ranks=group)
            for number, group in groups.items()
            if 1 < number < num_ranks and group != tuple(range(number))
        }
    each, subsets = num_ranks // hosts, {}
    for number, group in _groups(found, hosts, each).items():
        ranks = tuple(host * each + n for host in group for n in range(each))
        subset_figures = _subset_link_figures(found, group, hosts=hosts, each=each, sizes=sizes)
        if subset_figures:
            measured = _to_measurement({**found, **subset_figures}, num_ranks, kind=BETWEEN_HOSTS)
            joined = Joined(ranks=ranks, link=measured.link, handing=measured.handing)
            subsets[number * each] = joined
        elif ranks != tuple(range(len(ranks))):
            subsets[number * each] = Joined(ranks=ranks)
    return subsets


def _subset_link_figures(
    found: Mapping[str, float], group: Sequence[int], *, hosts: int, each: int, sizes: ExchangeSizes
) -> dict[str, float]:
    """Return the link figures of a subset of hosts; empty if only the set of all hosts contains it.

    They are those of collectives in the smallest measured subset that is at least as large.
    """
    numbers = range(len(group), hosts)
    number = next((n for n in numbers if name_of(n, "small") in found), None)
    if number is None:
        return {}
    timed = {name: found[name_of(number, name)] for name in sizes._fields}
    latency, rate = _latency_and_rate(timed, number * each, sizes)
    pairs = [(i, j) for i in group for j in group if i < j and rate_of(i, j) in found]
    hand_rate = min((found[rate_of(*pair)] for pair in pairs), default=found["hand rate"])
    hop = max((found[latency_of(*pair)] for pair in pairs), default=found["hop"])
    # The CPU cost per byte is the same at any rate.
    slowdown = found["hand disturbs"] * hand_rate / found["hand rate"]
    return {
        "latency": latency,
        "rate": rate,
        "disturbs": min(1.0, max(found[name_of(number, "disturbs")], ALMOST_ZERO)),
        "hop": hop,
        "hand rate": hand_rate,
        "hand disturbs": min(1.0, max(slowdown, ALMOST_ZERO)),
    }


def _subset_figures(
    found: Mapping[str, float],
    group: Sequence[int],
    names: Sequence[str],
    *,
    each: int,
    sizes: ExchangeSizes,
) -> dict[str, float]:
    """Return the figures that these hosts would have measured without the others.

    If their own collectives were not measured, there is no link probe; they then measure again when
    they meet.
    """
    number, hosts = len(group), len(names) // each
    ranks = [host * each + n for host in group for n in range(each)]
    inherited = (
        *_FIGURES,
        *_MESSAGES,
        *_SLOTS,
        "slot copied",
        *_SLOT_COLLECTIVES,
        *_WITHIN_HOST,
        *_SKEW,
    )
    subset = {name: found[name] for name in inherited if name in found}
    subset |= _subset_link_figures(found, group, hosts=hosts, each=each, sizes=sizes)
    speeds = [found[_speed_of(rank)] for rank in ranks]
    subset |= {_speed_of(n): speed / max(speeds) for n, speed in enumerate(speeds)}
    subset[_NAMES_KEY] = _names_hash([names[rank] for rank in ranks])
    positions = {host: position for position, host in enumerate(group)}
    for i in group:
        for j in group:
            if i < j and rate_of(i, j) in found:
                subset[rate_of(positions[i], positions[j])] = found[rate_of(i, j)]
                subset[latency_of(positions[i], positions[j])] = found[latency_of(i, j)]
    if name_of(number, "small") in found:
        subset |= {probe: found[name_of(number, f"least {probe.split()[0]}")] for probe in _PROBE}
    return subset


def remembered_probe(
    names: Sequence[str], *, hosts: int, torch_device: torch.device = CPU, cache: CostCache
) -> tuple[float, ...] | None:
    """Return the link probe of the last meeting of these hosts; None if it is unknown."""
    num_ranks = len(names)
    found = cache.read_rates(context_of(num_ranks, hosts=hosts, torch_device=torch_device))
    # Pairs have been timed since this format, so entries for more than two hosts must contain them.
    required = {*_PROBE, *([rate_of(0, 1)] if hosts > 2 else [])}
    is_known = is_whole(found, num_ranks, hosts=hosts) and required <= found.keys()
    if not is_known or found.get(_NAMES_KEY) != _names_hash(names):
        return None
    return tuple(found[name] for name in _PROBE)


def _names_hash(names: Sequence[str]) -> float:
    """Return a hash of the names that a float can represent exactly, because the cache stores
    floats.
    """
    return 1.0 + int(sha256("\n".join(names).encode()).hexdigest()[:12], 16)


def _to_measurement(figures: Mapping[str, float], num_ranks: int, *, kind: str) -> LinkMeasurement:
    link = Link(
        kind=kind,
        latency_seconds=figures["latency"],
        bytes_per_second=figures["rate"],
        doubt=DOUBT,
        call_seconds=figures["call"],
        disturbs=figures["disturbs"],
    )
    handing = replace(
        link,
        latency_seconds=figures["hop"],
        bytes_per_second=figures["hand rate"],
        call_seconds=figures["hand"],
        disturbs=figures["hand disturbs"],
    )
    speeds = tuple(figures[_speed_of(rank)] for rank in range(num_ranks))
    slots = Link(
        kind="slots",
        latency_seconds=figures["slot hop"],
        bytes_per_second=figures["slot rate"],
        doubt=DOUBT,
        call_seconds=figures["slot hand"],
        # The sender writes the message itself. If the other rank is on another host, a device
        # writes it from a local copy.
        disturbs=min(1.0, figures.get("slot copied", 1.0)),
        is_remote="slot copied" in figures,
        is_even=kind == BETWEEN_GPUS,
    )
    slotted = replace(
        slots,
        # The waiting rank does all of the work.
        disturbs=1.0,
        latency_seconds=figures["slotted hop"],
        bytes_per_second=figures["slotted rate"],
        call_seconds=figures["slotted call"],
    )
    near = None
    if "near" in figures:
        near = replace(
            link,
            latency_seconds=figures["near"],
            bytes_per_second=figures["near rate"],
            disturbs=figures["near disturbs"],
        )
    return LinkMeasurement(
        link=link,
        handing=handing,
        near=near,
        speeds=speeds if min(speeds) < 1 else (),
        slots=slots if slots.bytes_per_second > ALMOST_ZERO else None,
        slotted=slotted if slotted.bytes_per_second > ALMOST_ZERO else None,
        skew=_skew(figures),
    )


def _skew(found: Mapping[str, float]) -> Skew | None:
    if not found.keys() >= {*_SKEW}:
        return None
    short, short_after, long, long_after = (found[name] for name in _SKEW)
    return Skew(
        short_seconds=short_after, short_wait=short, long_seconds=long_after, long_wait=long
    )


def _speed_of(rank: int) -> str:
    return f"speed of rank {rank}"


def context_of(num_ranks: int, *, hosts: int = 1, torch_device: torch.device = CPU) -> str:
    """Return the cache context of the figures of ``num_ranks`` ranks."""
    cores = len(cores_of(0, 1))
    setup = (
        f"{num_ranks} ranks of gloo in turn, messages apart, slots watched, skew, on {cores} cores"
    )
    location = f", on {hosts} hosts{' with RDMA' if is_able() else ''}" if hosts > 1 else ""
    location += _on_gpus(torch_device) if torch_device.type == "cuda" else ""
    return f"{setup}{location}, torch {torch.__version__}"


def _gpu_suffix(torch_device: torch.device) -> str:
    return ", from its GPUs" if torch_device.type == "cuda" else ""


def _on_gpus(torch_device: torch.device) -> str:
    return (
        f", on {torch.cuda.device_count()} of {torch.cuda.get_device_properties(torch_device).name}"
    )


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
    num_ranks, speeds = len(rank_figures), _speeds(rank_figures, each)
    timed = {name: max(one[name] for one in rank_figures) for name in rank_figures[0]}
    latency, rate = _latency_and_rate(timed, num_ranks, sizes)
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
        **{_speed_of(rank): speed for rank, speed in enumerate(speeds)},
        **_mean_waits(rank_figures),
    }


def _mean_waits(rank_figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of the waits that the ranks measured; the last rank to arrive does not
    wait.
    """
    if any(name not in one for one in rank_figures for name in _SKEW):
        return {}
    return {name: max(fmean(one[name] for one in rank_figures), ALMOST_ZERO) for name in _SKEW}


def _host_figures(timed: Mapping[str, float], sizes: ExchangeSizes, each: int) -> dict[str, float]:
    if "near small" not in timed:
        return {}
    seconds = {name: timed[f"near {name}"] for name in sizes._fields}
    latency, rate = _latency_and_rate(seconds, each, sizes)
    return {"near": latency, "near rate": rate}


def _latency_and_rate(
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
    """Return the largest slowdown, times the rank's speed, since costs of slow ranks are scaled up
    later.
    """
    most = max(one[name] * speed for one, speed in zip(rank_figures, speeds, strict=True))
    return min(1.0, max(most, ALMOST_ZERO))


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
        return dict.fromkeys(_SLOTS, ALMOST_ZERO)
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
        return dict.fromkeys(_SLOT_COLLECTIVES, ALMOST_ZERO)
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


def _speeds(rank_figures: Sequence[Mapping[str, float]], each: int) -> list[float]:
    """Return speeds relative to the fastest rank; differences that may be noise count as none.

    With several hosts, all ranks of a host get its best speed, because they disturb each other now
    and then.
    """
    products = [one["product"] for one in rank_figures]
    of_host = [min(products[n : n + each]) for n in range(0, len(products), each)]
    least = min(products)
    speeds = [least / of_host[rank // each] for rank in range(len(products))]
    return [1.0 if speed > 1 - ALIKE_SHARE else speed for speed in speeds]


def command_of(
    rank: int, *, folder: str, num_ranks: int, torch_device: torch.device = CPU
) -> Sequence[str]:
    """Return Python's arguments for a rank that writes its results, for ``fitted``, to the
    folder.
    """
    module = "steelyard.measure.links.worker"
    return ["-m", module, folder, str(num_ranks), str(rank), torch_device.type]


def _measure_local_ranks(num_ranks: int, torch_device: torch.device) -> list[dict[str, float]]:
    """Return the figures that each rank of this machine measured."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    *command_of(
                        rank, folder=folder, num_ranks=num_ranks, torch_device=torch_device
                    ),
                ],
                # Restrict the listening sockets to this machine.
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            failures = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RunFailed(
                f"{num_ranks} ranks could not be measured within {SECONDS} s",
                expected="ranks on this machine that are each scheduled in that time",
                remedy="stop other processes on this machine, or plan for fewer ranks",
            ) from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        failed = [n for n, rank in enumerate(ranks) if rank.returncode]
        if failed:
            last_line = (failures[failed[0]].strip().splitlines() or ["no message"])[-1]
            raise RunFailed(
                f"{num_ranks} ranks could not be measured: rank {failed[0]} reported "
                f"{last_line[:120]}",
                expected="ranks on this machine that reach each other over its loopback interface",
                remedy="try: python -m torch.distributed.run --standalone --nproc-per-node 2",
            )
        return [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)
        ]
