"""Subsets of the ranks: which ranks a step should use, for each number of ranks.

The best-connected members come first. A member that computes slowly takes a smaller share of the
batch, while a member with a slow link delays every exchange. So links decide, and speeds matter
only between members with equal links. One subset for each number of ranks is enough: two subsets of
one size differ only in their slowest link and in their speeds. The slowest link of the chosen
subset is as fast as possible, and its speeds are the highest among such subsets. Not for the cost
of a step on a subset: see search/ranks/layout_search.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from steelyard.hardware.link import Link
from steelyard.hardware.topology import TopologyLevel
from steelyard.ir.collective import Exchange

# Message times that differ by less than this factor count as equal: the difference may be noise.
ALIKE = 1.4
# Environment variables of a launched process. The first says that the rendezvous store is hosted by
# a process that is not a rank. The second says which shares of the cores the ranks have: "0,2/3"
# means shares 0 and 2 of 3.
STORE_IS_HELD, PARTS_OF_CORES = "STEELYARD_STORE_IS_HELD", "STEELYARD_PARTS_OF_CORES"
# With at most this many members, groups are grown from each of them as the seed.
_MOST_SEEDS = 32
# With at most this many hosts, every number of hosts is a candidate.
_FEW_HOSTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """The ranks of one subset in ascending order, with their links.

    ``links``, by mesh axis, are the links among these ranks if they differ from those of all
    ranks. ``collective_curves`` are the times of whole exchanges, by axis, kind, number of ranks
    and distance, if links are only declared.
    """

    ranks: tuple[int, ...]
    links: Mapping[str, Link] = field(default_factory=dict)
    collective_curves: Mapping[tuple[str, Exchange, int, int], Link] = field(default_factory=dict)


def best_joined(
    seconds: Sequence[Sequence[float]], speeds: Sequence[float] = ()
) -> dict[int, tuple[int, ...]]:
    """Return, for each number of members from 1 to all, which ones to use, in ascending order.

    Members are hosts or ranks. ``seconds[i][j]`` is the time of one message of a fixed size between
    members i and j, and ``speeds`` are their compute speeds. If all are equal, these are the first
    members.
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
    """Return the message time of the slowest pair of these members."""
    members = tuple(members)
    return max((seconds[i][j] for i in members for j in members if i != j), default=0.0)


def better_joined(
    found: Mapping[int, tuple[int, ...]], seconds: Sequence[Sequence[float]]
) -> tuple[int, ...]:
    """Return the subset sizes, largest first, whose links are worth measuring separately.

    The slowest link of such a subset is clearly faster than that of the next larger one returned
    here, or of all members.
    """
    chosen: list[int] = []
    worst = slowest(found[len(seconds)], seconds)
    for number in range(len(seconds) - 1, 1, -1):
        own = slowest(found[number], seconds)
        if own * ALIKE < worst:
            chosen.append(number)
            worst = own
    return tuple(chosen)


def declared_seconds(tree: TopologyLevel) -> list[list[float]]:
    """Return the time of a message of 1 MiB between every two devices of a declared cluster."""
    count = tree.num_devices
    seconds = [[0.0] * count for _ in range(count)]
    for i in range(count):
        for j in range(i + 1, count):
            links = [member.link for member in tree.between(i, j) if member.link is not None]
            took = max(link.seconds(1 << 20, messages=1) for link in links)
            seconds[i][j] = seconds[j][i] = took
    return seconds


def numbers_of_ranks(num_ranks: int, *, of_a_host: int = 1) -> tuple[int, ...]:
    """Return numbers of ranks that a step may use in addition to the divisors of ``num_ranks``.

    These are all ranks of some of the hosts. With many hosts, this is only tried with all hosts but
    one, because each number of ranks has to be captured.
    """
    whole = range(of_a_host, num_ranks, of_a_host)
    others = [n for n in whole if num_ranks % n]
    return tuple(others if len(whole) < _FEW_HOSTS else others[-1:])


def named(hosts: Sequence[int]) -> str:
    """Return ``host 2``, ``hosts 0 and 2`` or ``hosts 0, 1 and 2``."""
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
    """Return the members in the order in which a group grows from ``seed``.

    Each step adds the member whose slowest link to the group is fastest; among equal links, the
    member that computes fastest.
    """
    order = [seed]
    worst = {m: seconds[seed][m] for m in range(len(seconds)) if m != seed}
    while worst:
        equal = [m for m in worst if worst[m] <= ALIKE * min(worst.values())]
        chosen = min(equal, key=lambda m: (-speeds[m], m))
        order.append(chosen)
        del worst[chosen]
        worst = {m: max(took, seconds[chosen][m]) for m, took in worst.items()}
    return tuple(order)


def _best(
    groups: Sequence[tuple[int, ...]],
    seconds: Sequence[Sequence[float]],
    speeds: Sequence[float],
) -> tuple[int, ...]:
    """Return the group whose slowest link is fastest; ties go to speed, then to low numbers."""
    worst = {group: slowest(group, seconds) for group in groups}
    least = min(worst.values())
    equal = [group for group in worst if worst[group] <= ALIKE * least]
    return min(equal, key=lambda group: (-sum(speeds[m] for m in group), group))
