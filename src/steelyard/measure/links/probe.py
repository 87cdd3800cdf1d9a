"""What joins ranks, and how fast each of them computes, as figures that are remembered.

Those of this machine are started to be measured, each on its part of the cores; those of several
hosts, or that somebody else put elsewhere, measure when they have met, and ``fitted`` makes
figures of what they say. Not for what a rank does to be measured: see worker.py.
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
    name_of,
    pair_seconds,
    rate_of,
    timed_joins,
)
from steelyard.measure.links.worker import (
    DOUBT,
    NEXT_TO_NONE,
    SECONDS,
    SIZES,
    ExchangeSizes,
    sizes_of,
)
from steelyard.predict.arrival_skew import Skew
from steelyard.predict.rank_subsets import best_joined

BETWEEN_HOSTS, BETWEEN_GPUS = "network between hosts", "between GPUs"
_FIGURES = ("latency", "rate", "call", "disturbs")
# Of messages from one rank to the next.
_HANDED = ("hop", "hand", "hand rate", "hand disturbs")
# Of messages through slots in memory that ranks share.
_SLOTS = ("slot hop", "slot rate", "slot hand")
# Of what all exchange so.
_SLOTTED = ("slotted call", "slotted hop", "slotted rate")
# Among ranks of one host, where there are several hosts.
_NEAR = ("near", "near rate", "near disturbs")
# How long ranks wait for the last one, after how long; not of GPUs, nor in older lists.
_SKEW = ("skew short", "skew short after", "skew long", "skew long after")
# Of hosts: which they were, and what tells whether their link has become another.
_NAMES, _LOOK = "hosts", ("small look", "middle look")
# Ranks on equal cores differ by as much, by what else the machine does.
ALIKE_SHARE = 0.15
# Of hosts that met in this process, whose list of prices may be of no use.
_met_here: dict[str, dict[str, float]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """Of some ranks: what joins them where all exchange something, and where one hands something to
    another, and both through memory that they share, where they can; what joins those of one host,
    where others are on other hosts; and how fast each computes beside the fastest, no speeds where
    they do not differ by more than the doubt."""

    link: Link
    handing: Link
    near: Link | None
    speeds: tuple[float, ...]
    slots: Link | None
    slotted: Link | None
    skew: Skew | None
    # Those to lie on for each smaller number of ranks, where they are not simply the first ones.
    subsets: Mapping[int, "Joined"] = field(default_factory=dict)
    # Of each host's link, in bytes a second, where it is known.
    host_rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Some of the ranks, with the links among them where these are better than those of all."""

    ranks: tuple[int, ...]
    link: Link | None = None
    handing: Link | None = None


def measured_ranks(
    num_ranks: int,
    *,
    hosts: int = 1,
    home: torch.device = CPU,
    speeds: Sequence[float] = (),
    cache: CostCache | None = None,
) -> LinkMeasurement:
    """So many ranks, measured once and remembered: on this machine they are started for it, where
    ``home`` is one of its GPUs each on one, and those of several hosts have met before. ``speeds``
    are believed in place of those that were measured."""
    context = context_of(num_ranks, hosts=hosts, home=home)
    found = cache.read_rates(context) if cache and hosts == 1 else {}
    if hosts > 1:
        if (together := ALL_HOSTS.get()) is not None:
            together(home)
        # What was found in this process holds, whatever became of the list.
        found = _met_here.get(context, cache.read_rates(context) if cache else {})
        if not is_whole(found, num_ranks, hosts=hosts):
            each = num_ranks // hosts
            raise BadInput(
                f"this host has not measured what joins it to {hosts - 1} more{_of_gpus(home)}",
                expected="hosts that have met, as they do to make a plan for such a model",
                remedy=f"on each: torchrun --nnodes {hosts} --nproc-per-node {each} ... -m "
                "steelyard plan",
            )
    if not is_whole(found, num_ranks):
        found = fitted(_said(num_ranks, home), sizes=SIZES[home.type])
        if cache:
            # Another process may have been first.
            found = {**found, **cache.read_rates(context)}
            cache.write_rates(context, found)
    here = "loopback" if home.type == "cpu" else BETWEEN_GPUS
    measured = _measured(found, num_ranks, kind=here if hosts == 1 else BETWEEN_HOSTS)
    if speeds:
        found = {**found, **{_speed_of(rank): speed for rank, speed in enumerate(speeds)}}
    subsets = _subsets(found, num_ranks, hosts=hosts, sizes=sizes_of(home, hosts))
    rates = host_rates(found, hosts) if hosts > 2 else []
    return replace(measured, subsets=subsets, host_rates=tuple(rates))


def is_whole(found: Mapping[str, float], num_ranks: int, *, hosts: int = 1) -> bool:
    """Whether no figure is missing of what is remembered."""
    near = _NEAR if 1 < hosts < num_ranks else ()
    speeds_of = map(_speed_of, range(num_ranks))
    return found.keys() >= {*_FIGURES, *_HANDED, *_SLOTS, *_SLOTTED, *near, *speeds_of}


def remember_hosts(
    said: Sequence[Mapping[str, float]],
    names: Sequence[str],
    *,
    hosts: int,
    home: torch.device = CPU,
    session: Sequence[float],
    joins: Mapping[str, float] | None = None,
    cache: CostCache,
) -> None:
    """What the ranks, which have their hosts' names, said of themselves; ``session`` is what they
    will
    look at when they meet again. ``joins`` are figures of pairs and subsets of the hosts, of which
    each subset that a plan may lie on is remembered as if it had met by itself."""
    context = context_of(len(names), hosts=hosts, home=home)
    capture_and_price = dict(zip(_LOOK, session, strict=True))
    near, each = SIZES[home.type], len(names) // hosts
    figures = fitted(said, sizes=sizes_of(home, hosts), near=near, each=each)
    found = {**figures, **(joins or {}), **capture_and_price, _NAMES: _number_of(names)}
    _met_here[context] = found
    cache.write_rates(context, found)
    for members in _groups(found, hosts, each).values():
        own = _figures_of(found, members, names, each=each, sizes=sizes_of(home, hosts))
        context = context_of(len(members) * each, hosts=len(members), home=home)
        _met_here[context] = own
        cache.write_rates(context, own)


def measured_joins(
    said: Sequence[Mapping[str, float]], *, hosts: int, home: torch.device = CPU
) -> dict[str, float]:
    """Figures of each two hosts and of those that are joined best; all ranks measure together."""
    each = len(said) // hosts
    return timed_joins(_speeds(said, each)[::each], each=each, sizes=sizes_of(home, hosts))


def _groups(found: Mapping[str, float], hosts: int, each: int) -> Mapping[int, tuple[int, ...]]:
    """The hosts to lie on, for each number of several hosts but all; none where pairs of hosts
    were not timed."""
    if hosts < 3 or rate_of(0, 1) not in found:
        return {}
    speeds = [found[_speed_of(host * each)] for host in range(hosts)]
    groups = best_joined(pair_seconds(found, hosts), speeds)
    return {number: groups[number] for number in range(2, hosts)}


def _subsets(
    found: Mapping[str, float], num_ranks: int, *, hosts: int, sizes: ExchangeSizes
) -> dict[int, Joined]:
    if hosts == 1:
        # Any two ranks of one machine are as near.
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
        own = _joined_figures(found, group, hosts=hosts, each=each, sizes=sizes)
        if own:
            there = _measured({**found, **own}, num_ranks, kind=BETWEEN_HOSTS)
            joined = Joined(ranks=ranks, link=there.link, handing=there.handing)
            subsets[number * each] = joined
        elif ranks != tuple(range(len(ranks))):
            subsets[number * each] = Joined(ranks=ranks)
    return subsets


def _joined_figures(
    found: Mapping[str, float], group: Sequence[int], *, hosts: int, each: int, sizes: ExchangeSizes
) -> dict[str, float]:
    """What joins these hosts, by the exchanges of the smallest group that was measured and is no
    smaller; empty where that is all of them."""
    numbers = range(len(group), hosts)
    number = next((n for n in numbers if name_of(n, "small") in found), None)
    if number is None:
        return {}
    timed = {name: found[name_of(number, name)] for name in sizes._fields}
    latency, rate = _latency_and_rate(timed, number * each, sizes)
    pairs = [(i, j) for i in group for j in group if i < j and rate_of(i, j) in found]
    hand_rate = min((found[rate_of(*pair)] for pair in pairs), default=found["hand rate"])
    hop = max((found[latency_of(*pair)] for pair in pairs), default=found["hop"])
    # What a byte takes of the core is the same at any rate.
    slows = found["hand disturbs"] * hand_rate / found["hand rate"]
    return {
        "latency": latency,
        "rate": rate,
        "disturbs": min(1.0, max(found[name_of(number, "disturbs")], NEXT_TO_NONE)),
        "hop": hop,
        "hand rate": hand_rate,
        "hand disturbs": min(1.0, max(slows, NEXT_TO_NONE)),
    }


def _figures_of(
    found: Mapping[str, float],
    group: Sequence[int],
    names: Sequence[str],
    *,
    each: int,
    sizes: ExchangeSizes,
) -> dict[str, float]:
    """As these hosts would have measured it, had no others come. Where their own exchanges were not
    measured there is nothing to look at when they meet, and they measure."""
    number, hosts = len(group), len(names) // each
    ranks = [host * each + n for host in group for n in range(each)]
    kept = (*_FIGURES, *_HANDED, *_SLOTS, "slot copied", *_SLOTTED, *_NEAR, *_SKEW)
    own = {name: found[name] for name in kept if name in found}
    own |= _joined_figures(found, group, hosts=hosts, each=each, sizes=sizes)
    speeds = [found[_speed_of(rank)] for rank in ranks]
    own |= {_speed_of(n): speed / max(speeds) for n, speed in enumerate(speeds)}
    own[_NAMES] = _number_of([names[rank] for rank in ranks])
    places = {host: place for place, host in enumerate(group)}
    for i in group:
        for j in group:
            if i < j and rate_of(i, j) in found:
                own[rate_of(places[i], places[j])] = found[rate_of(i, j)]
                own[latency_of(places[i], places[j])] = found[latency_of(i, j)]
    if name_of(number, "small") in found:
        own |= {session: found[name_of(number, f"least {session.split()[0]}")] for session in _LOOK}
    return own


def remembered_probe(
    names: Sequence[str], *, hosts: int, home: torch.device = CPU, cache: CostCache
) -> tuple[float, ...] | None:
    """What was looked at when ranks of hosts of these names last met; None where others did, or
    nobody."""
    num_ranks = len(names)
    found = cache.read_rates(context_of(num_ranks, hosts=hosts, home=home))
    # Of more than two hosts each pair is timed, since it became known how to.
    looks = {*_LOOK, *([rate_of(0, 1)] if hosts > 2 else [])}
    is_known = is_whole(found, num_ranks, hosts=hosts) and looks <= found.keys()
    if not is_known or found.get(_NAMES) != _number_of(names):
        return None
    return tuple(found[name] for name in _LOOK)


def _number_of(names: Sequence[str]) -> float:
    """One that a list of figures holds, and that a float holds exactly."""
    return 1.0 + int(sha256("\n".join(names).encode()).hexdigest()[:12], 16)


def _measured(found: Mapping[str, float], num_ranks: int, *, kind: str) -> LinkMeasurement:
    link = Link(
        kind=kind,
        latency_seconds=found["latency"],
        bytes_per_second=found["rate"],
        doubt=DOUBT,
        call_seconds=found["call"],
        disturbs=found["disturbs"],
    )
    handing = replace(
        link,
        latency_seconds=found["hop"],
        bytes_per_second=found["hand rate"],
        call_seconds=found["hand"],
        disturbs=found["hand disturbs"],
    )
    speeds = tuple(found[_speed_of(rank)] for rank in range(num_ranks))
    slots = Link(
        kind="slots",
        latency_seconds=found["slot hop"],
        bytes_per_second=found["slot rate"],
        doubt=DOUBT,
        call_seconds=found["slot hand"],
        # Who sends a message writes it itself; to another host a device does, of what lies here.
        disturbs=min(1.0, found.get("slot copied", 1.0)),
        is_remote="slot copied" in found,
        is_even=kind == BETWEEN_GPUS,
    )
    slotted = replace(
        slots,
        # Whoever waits does all of it.
        disturbs=1.0,
        latency_seconds=found["slotted hop"],
        bytes_per_second=found["slotted rate"],
        call_seconds=found["slotted call"],
    )
    near = None
    if "near" in found:
        near = replace(
            link,
            latency_seconds=found["near"],
            bytes_per_second=found["near rate"],
            disturbs=found["near disturbs"],
        )
    return LinkMeasurement(
        link=link,
        handing=handing,
        near=near,
        speeds=speeds if min(speeds) < 1 else (),
        slots=slots if slots.bytes_per_second > NEXT_TO_NONE else None,
        slotted=slotted if slotted.bytes_per_second > NEXT_TO_NONE else None,
        skew=_skew(found),
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


def context_of(num_ranks: int, *, hosts: int = 1, home: torch.device = CPU) -> str:
    """Under which the figures of so many ranks are remembered."""
    cores = len(cores_of(0, 1))
    said = (
        f"{num_ranks} ranks of gloo in turn, messages apart, slots watched, skew, on {cores} cores"
    )
    among = f", on {hosts} hosts{' with RDMA' if is_able() else ''}" if hosts > 1 else ""
    among += _on_gpus(home) if home.type == "cuda" else ""
    return f"{said}{among}, torch {torch.__version__}"


def _of_gpus(home: torch.device) -> str:
    return ", from its GPUs" if home.type == "cuda" else ""


def _on_gpus(home: torch.device) -> str:
    return f", on {torch.cuda.device_count()} of {torch.cuda.get_device_properties(home).name}"


def fitted(
    said: Sequence[Mapping[str, float]],
    *,
    sizes: ExchangeSizes = SIZES["cpu"],
    near: ExchangeSizes = SIZES["cpu"],
    each: int = 1,
) -> dict[str, float]:
    """A line through the times of a small and two large exchanges, as a ring sends them, and one
    through those of messages from one rank to the next; of what each rank said, the slowest
    counts. There are ``each`` on one host, which may have exchanged something for themselves, as
    large as ``near``."""
    num_ranks, speeds = len(said), _speeds(said, each)
    timed = {name: max(one[name] for one in said) for name in said[0]}
    latency, rate = _latency_and_rate(timed, num_ranks, sizes)
    hops = 2 * (num_ranks - 1)
    return {
        "latency": latency,
        "rate": rate,
        "call": max(timed["call"] / hops, NEXT_TO_NONE),
        "disturbs": _slowing("disturbs", said, speeds),
        **_among_neighbours(timed, near, each),
        **({"near disturbs": _slowing("near disturbs", said, speeds)} if each > 1 else {}),
        **_handed_on(timed, sizes),
        "hand disturbs": _slowing("hand disturbs", said, speeds),
        **_through_slots(timed, sizes),
        **_exchanged_through_slots(timed, num_ranks, sizes),
        **{_speed_of(rank): speed for rank, speed in enumerate(speeds)},
        **_waits_for_the_last(said),
    }


def _waits_for_the_last(said: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of the waits that the ranks measured; the last one to arrive has none."""
    if any(name not in one for one in said for name in _SKEW):
        return {}
    return {name: max(fmean(one[name] for one in said), NEXT_TO_NONE) for name in _SKEW}


def _among_neighbours(
    timed: Mapping[str, float], sizes: ExchangeSizes, each: int
) -> dict[str, float]:
    if "near small" not in timed:
        return {}
    near = {name: timed[f"near {name}"] for name in sizes._fields}
    latency, rate = _latency_and_rate(near, each, sizes)
    return {"near": latency, "near rate": rate}


def _latency_and_rate(
    timed: Mapping[str, float], num_ranks: int, sizes: ExchangeSizes
) -> tuple[float, float]:
    """Of each hop around the ring, and of the bytes that each rank sends."""
    small, middle, large = (
        GLOO.collective(Exchange.ALL_REDUCE, axis="", num_ranks=num_ranks, nbytes=nbytes)
        for nbytes in sizes
    )
    seconds = timed["large"] - timed["middle"]
    rate = (large.sent_bytes - middle.sent_bytes) / max(seconds, NEXT_TO_NONE)
    latency = (timed["small"] - small.sent_bytes / rate) / small.hops
    return max(latency, NEXT_TO_NONE), rate


def _slowing(what: str, said: Sequence[Mapping[str, float]], speeds: Sequence[float]) -> float:
    """What is taken of a slow rank is priced by its speed again."""
    most = max(one[what] * speed for one, speed in zip(said, speeds, strict=True))
    return min(1.0, max(most, NEXT_TO_NONE))


def _handed_on(timed: Mapping[str, float], sizes: ExchangeSizes) -> dict[str, float]:
    seconds = max(timed["hop middle"] - timed["hop small"], NEXT_TO_NONE)
    rate = (sizes.middle - sizes.small) / seconds
    return {
        "hop": max(timed["hop small"] - sizes.small / rate, NEXT_TO_NONE),
        "hand": max(timed["hand"], NEXT_TO_NONE),
        "hand rate": rate,
    }


def _through_slots(timed: Mapping[str, float], sizes: ExchangeSizes) -> dict[str, float]:
    """Next to none of anything where there is no memory to share. What two ranks' cores do for a
    message is not on its way."""
    if "slot small" not in timed:
        return dict.fromkeys(_SLOTS, NEXT_TO_NONE)
    seconds = max(timed["slot large"] - timed["slot small"], NEXT_TO_NONE)
    return {
        "slot hop": max(timed["slot small"] - 2 * timed["slot hand"], NEXT_TO_NONE),
        "slot rate": (sizes.middle - sizes.small) / seconds,
        "slot hand": max(timed["slot hand"], NEXT_TO_NONE),
        **_copied(timed, seconds),
    }


def _copied(timed: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Of the time that a message takes to another host, what a copy of it takes here."""
    if "slot copy" not in timed:
        return {}
    return {"slot copied": max(timed["slot copy"] / seconds, NEXT_TO_NONE)}


def _exchanged_through_slots(
    timed: Mapping[str, float], num_ranks: int, sizes: ExchangeSizes
) -> dict[str, float]:
    if "slotted small" not in timed:
        return dict.fromkeys(_SLOTTED, NEXT_TO_NONE)
    small, middle = (
        THROUGH_SLOTS.collective(Exchange.ALL_REDUCE, axis="", num_ranks=num_ranks, nbytes=nbytes)
        for nbytes in sizes[:2]
    )
    seconds = max(timed["slotted middle"] - timed["slotted small"], NEXT_TO_NONE)
    call = timed["slotted call"] / small.hops
    return {
        "slotted call": max(call, NEXT_TO_NONE),
        "slotted hop": max(timed["slotted small"] / small.hops - call, NEXT_TO_NONE),
        "slotted rate": (middle.sent_bytes - small.sent_bytes) / seconds,
    }


def _speeds(said: Sequence[Mapping[str, float]], each: int) -> list[float]:
    """Those within the doubt of the fastest are taken to be as fast; of several hosts those of one
    are, which get in each other's way for moments."""
    products = [one["product"] for one in said]
    of_host = [min(products[n : n + each]) for n in range(0, len(products), each)]
    least = min(products)
    speeds = [least / of_host[rank // each] for rank in range(len(products))]
    return [1.0 if speed > 1 - ALIKE_SHARE else speed for speed in speeds]


def command_of(
    rank: int, *, folder: str, num_ranks: int, home: torch.device = CPU
) -> Sequence[str]:
    """Of Python, for a rank that puts what it measures into the folder, to be ``fitted``."""
    module = "steelyard.measure.links.worker"
    return ["-m", module, folder, str(num_ranks), str(rank), home.type]


def _said(num_ranks: int, home: torch.device) -> list[dict[str, float]]:
    """What each rank of this machine measured."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, *command_of(rank, folder=folder, num_ranks=num_ranks, home=home)],
                # Nothing listens beyond this machine.
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
                expected="ranks on this machine that each come to compute for a while",
                remedy="stop what else runs here, or plan for fewer ranks",
            ) from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        failed = [n for n, rank in enumerate(ranks) if rank.returncode]
        if failed:
            said = (failures[failed[0]].strip().splitlines() or ["nothing was said"])[-1]
            raise RunFailed(
                f"{num_ranks} ranks could not be measured: rank {failed[0]} says {said[:120]}",
                expected="ranks on this machine that reach one another over its loopback",
                remedy="try: python -m torch.distributed.run --standalone --nproc-per-node 2",
            )
        return [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)
        ]
