"""Figures of links by name, as the cache stores them, and the links that they describe.

Not for fitting figures to measured times: see link_fit.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from steelyard.hardware.cluster import Link
from steelyard.predict.arrival_skew import Skew

BETWEEN_HOSTS, BETWEEN_GPUS = "network between hosts", "between GPUs"
# The cache stores only values above zero.
ALMOST_ZERO = 1e-12
DOUBT = 0.15
FIGURES = ("latency", "rate", "call", "disturbs")
# Figures of messages from one rank to the next.
MESSAGES = ("hop", "hand", "hand rate", "hand disturbs")
# Figures of messages through slots in shared memory.
SLOTS = ("slot hop", "slot rate", "slot hand")
# Figures of collectives through slots in shared memory.
SLOT_COLLECTIVES = ("slotted call", "slotted hop", "slotted rate")
# Figures for the ranks of one host, if there are several hosts.
WITHIN_HOST = ("near", "near rate", "near disturbs")
# Arrival skew: the wait for the last rank, and the compute time before it. This is missing for GPUs
# and in older cache entries.
SKEW = ("skew short", "skew short after", "skew long", "skew long after")
# For hosts: a hash of their names, and the link probe that detects a changed link.
NAMES_KEY, PROBE = "hosts", ("small look", "middle look")


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


def to_measurement(figures: Mapping[str, float], num_ranks: int, *, kind: str) -> LinkMeasurement:
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
    speeds = tuple(figures[speed_of(rank)] for rank in range(num_ranks))
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
    if not found.keys() >= {*SKEW}:
        return None
    short, short_after, long, long_after = (found[name] for name in SKEW)
    return Skew(
        short_seconds=short_after, short_wait=short, long_seconds=long_after, long_wait=long
    )


def is_whole(found: Mapping[str, float], num_ranks: int, *, hosts: int = 1) -> bool:
    """True if the cached figures are complete."""
    host_keys = WITHIN_HOST if 1 < hosts < num_ranks else ()
    speeds_of = map(speed_of, range(num_ranks))
    return found.keys() >= {
        *FIGURES,
        *MESSAGES,
        *SLOTS,
        *SLOT_COLLECTIVES,
        *host_keys,
        *speeds_of,
    }


def speed_of(rank: int) -> str:
    return f"speed of rank {rank}"


def names_hash(names: Sequence[str]) -> float:
    """Return a hash of the names that a float can represent exactly, because the cache stores
    floats.
    """
    return 1.0 + int(sha256("\n".join(names).encode()).hexdigest()[:12], 16)
