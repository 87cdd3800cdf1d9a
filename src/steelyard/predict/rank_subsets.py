"""Subsets of the ranks: for each number of ranks, the ones that a step should lie on.

The best-joined members come first. A member that computes slowly takes a smaller share of the
batch, while one behind a slow link holds up every exchange of all; so links decide, and speeds only
between members that are joined alike. One subset for each number of ranks is enough: two subsets of
one size differ only in their slowest link and in their speeds, and the one chosen here has the
fastest slowest link, and the highest speeds among those. Not for what a step takes on a subset: see
search/ranks/layout_search.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from steelyard.hardware.link import Link
from steelyard.hardware.topology import TopologyLevel
from steelyard.ir.collective import Exchange

# Times of two pairs that differ by less are noise of the measurement, and are taken to be equal.
ALIKE = 1.4
# How a process that was started knows: that the store at which ranks meet is held by one that is
# none of them, and which parts of the cores of how many the ranks have, "0,2/3".
STORE_IS_HELD, PARTS_OF_CORES = "STEELYARD_STORE_IS_HELD", "STEELYARD_PARTS_OF_CORES"
# A group is grown from each member in turn where there are at most so many members.
_MOST_SEEDS = 32
# Of up to so many hosts any number is a candidate.
_FEW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """The ranks of one subset in ascending order, and the links among them, by mesh axis, where
    these differ from those of all ranks; or what whole exchanges take, by axis, kind, number of
    ranks and distance, where links are only declared."""

    ranks: tuple[int, ...]
    links: Mapping[str, Link] = field(default_factory=dict)
    collective_curves: Mapping[tuple[str, Exchange, int, int], Link] = field(default_factory=dict)


def best_joined(
    seconds: Sequence[Sequence[float]], speeds: Sequence[float] = ()
) -> dict[int, tuple[int, ...]]:
    """For each number of members from 1 to all, the members to take, in ascending order.

    ``seconds[i][j]`` is the time of one message of a fixed size between members i and j, and
    ``speeds`` are how fast each computes. Members are hosts or ranks. Where all are alike these are
    the first ones.
    """
    count = len(seconds)
    speeds = tuple(speeds) or (1.0,) * count
    ordered = sorted(range(count), key=lambda member: (-speeds[member], member))
    grown = [_grown(seed, seconds, speeds) for seed in _seeds(ordered, seconds)]
    found = {1: tuple(ordered[:1])} if count else {}
    for number in range(2, count):
        groups = [tuple(sorted(order[:number])) for order in grown]
        found[number] = _best(groups, seconds, speeds)
    if count > 1:
        found[count] = tuple(range(count))
    return found


def slowest(members: Iterable[int], seconds: Sequence[Sequence[float]]) -> float:
    """The time of a message between the two of these members that are joined worst."""
    members = tuple(members)
    return max((seconds[i][j] for i in members for j in members if i != j), default=0.0)


def better_joined(
    found: Mapping[int, tuple[int, ...]], seconds: Sequence[Sequence[float]]
) -> tuple[int, ...]:
    """The numbers of members, largest first, whose subset has a clearly faster slowest link than
    the next larger one that is named here, or than all: links in it are worth measuring apart."""
    kept: list[int] = []
    worst = slowest(found[len(seconds)], seconds)
    for number in range(len(seconds) - 1, 1, -1):
        own = slowest(found[number], seconds)
        if own * ALIKE < worst:
            kept.append(number)
            worst = own
    return tuple(kept)


def declared_seconds(tree: TopologyLevel) -> list[list[float]]:
    """The time of a message of 1 MiB between each two devices of a declared cluster."""
    count = tree.num_devices
    seconds = [[0.0] * count for _ in range(count)]
    for i in range(count):
        for j in range(i + 1, count):
            links = [member.link for member in tree.between(i, j) if member.link is not None]
            took = max(link.seconds(1 << 20, messages=1) for link in links)
            seconds[i][j] = seconds[j][i] = took
    return seconds


def numbers_of_ranks(num_ranks: int, *, of_a_host: int = 1) -> tuple[int, ...]:
    """On how many ranks a step may lie besides divisors of ``num_ranks``: on all ranks of some
    hosts. Of many hosts only all but one, since each number has to be captured."""
    whole = range(of_a_host, num_ranks, of_a_host)
    others = [n for n in whole if num_ranks % n]
    return tuple(others if len(whole) < _FEW else others[-1:])


def named(hosts: Sequence[int]) -> str:
    """``host 2``, ``hosts 0 and 2`` or ``hosts 0, 1 and 2``."""
    if len(hosts) == 1:
        return f"host {hosts[0]}"
    return f"hosts {', '.join(map(str, hosts[:-1]))} and {hosts[-1]}"


def _seeds(ordered: Sequence[int], seconds: Sequence[Sequence[float]]) -> Sequence[int]:
    if len(ordered) <= _MOST_SEEDS:
        return ordered
    nearest = {m: min(seconds[m][o] for o in ordered if o != m) for m in ordered}
    return [min(ordered, key=nearest.__getitem__)]


def _grown(
    seed: int, seconds: Sequence[Sequence[float]], speeds: Sequence[float]
) -> tuple[int, ...]:
    """Members in order: starting with one, the best joined of the rest each time."""
    order = [seed]
    worst = {m: seconds[seed][m] for m in range(len(seconds)) if m != seed}
    while worst:
        alike = [m for m in worst if worst[m] <= ALIKE * min(worst.values())]
        chosen = min(alike, key=lambda m: (-speeds[m], m))
        order.append(chosen)
        del worst[chosen]
        worst = {m: max(took, seconds[chosen][m]) for m, took in worst.items()}
    return tuple(order)


def _best(
    groups: Sequence[tuple[int, ...]],
    seconds: Sequence[Sequence[float]],
    speeds: Sequence[float],
) -> tuple[int, ...]:
    """The fastest slowest link; among those alike, the most speed, and then the lowest numbers."""
    worst = {group: slowest(group, seconds) for group in groups}
    least = min(worst.values())
    alike = [group for group in worst if worst[group] <= ALIKE * least]
    return min(alike, key=lambda group: (-sum(speeds[m] for m in group), group))
