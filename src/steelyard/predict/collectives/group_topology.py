"""What a group of ranks finds between its members: level by level, how many are joined, by what.

Counted by patterns, so that a group over 2,048 equal nodes is no more work than one over two. Not
for what an exchange then takes: see predict/collectives/algorithms.py.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from steelyard.errors import BadInput
from steelyard.hardware.device import Device
from steelyard.hardware.link import Link
from steelyard.hardware.topology import LevelMember, TopologyLevel

# Sorted, and a range wherever the steps are even: so that equal patterns are found equal.
Group = range | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Uplink:
    """What one member of a scope goes out by, and how much of the group is behind it.

    ``devices`` counts all behind it, ``ranks`` those of the group. ``host_link`` is what a device
    of a node passes on its way to the node's own ports.
    """

    link: Link
    ports: int
    ranks: int
    devices: int
    host_link: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The scopes of one height that hold ranks of a group, over the whole cluster.

    ``members`` is how many members with ranks of the group all of them have, ``fewest`` and
    ``most`` of one. ``gates`` are what those go out by, each kind once; ``outward`` are those that
    are also passed on the way to other scopes.
    """

    name: str
    scopes: int
    members: int
    fewest: int
    most: int
    gates: tuple[Uplink, ...]
    outward: tuple[Uplink, ...]

    @property
    def hops(self) -> int:
        """From rank to rank along the group, how many steps lead through these scopes."""
        return self.members - self.scopes

    @property
    def is_even(self) -> bool:
        return self.fewest == self.most


def group_of(ranks: Sequence[int]) -> Group:
    """Sorted; refuses a rank that is named twice."""
    if isinstance(ranks, range) and ranks.step > 0:
        return ranks
    sorted_ranks = tuple(sorted(ranks))
    if len(set(sorted_ranks)) < len(sorted_ranks):
        raise BadInput(
            "a group names a rank twice",
            expected="each rank once",
            remedy="leave out what is there already",
        )
    return _evenly(sorted_ranks)


def levels(cluster: TopologyLevel, ranks: Sequence[int]) -> tuple[Level, ...]:
    """From inner to outer, up to the scope that holds the group."""
    group = group_of(ranks)
    if not group:
        return ()
    place = cluster.holding(group[0], group[-1])
    found: dict[int, _Found] = {}
    _collect(place.scope, _moved(group, place.first_rank), times=1, found=found)
    return tuple(found[height].level() for height in sorted(found))


@dataclass(slots=True)
class _Found:
    """What is known of a level so far."""

    names: dict[str, None] = field(default_factory=dict)
    scopes: int = 0
    joined: list[tuple[int, int]] = field(default_factory=list)
    gates: dict[Uplink, None] = field(default_factory=dict)
    outward: dict[Uplink, None] = field(default_factory=dict)

    def level(self) -> Level:
        return Level(
            name=" and ".join(self.names),
            scopes=self.scopes,
            members=sum(members * times for members, times in self.joined),
            fewest=min(members for members, _ in self.joined),
            most=max(members for members, _ in self.joined),
            gates=tuple(self.gates),
            outward=tuple(self.outward),
        )


def _collect(scope: TopologyLevel, group: Group, *, times: int, found: dict[int, _Found]) -> int:
    """The height of the scope; devices have none."""
    height, joined, gates = 1, 0, list[tuple[Uplink, bool]]()
    for begin, member in scope.blocks():
        for count, inner in _shared_out(_part(group, begin, member.num_devices), member.size):
            joined += count
            if member.link is not None:
                gates.append((_gate(member, member.link, len(inner)), member.size > 1))
            if isinstance(member.of, TopologyLevel):
                inner_times = times * count
                height = max(height, 1 + _collect(member.of, inner, times=inner_times, found=found))
    level = found.setdefault(height, _Found())
    level.names[scope.name] = None
    level.scopes += times
    level.joined.append((joined, times))
    for gate, leads_on in gates:
        level.gates[gate] = None
        if leads_on:
            level.outward[gate] = None
    return height


def _gate(member: LevelMember, link: Link, ranks: int) -> Uplink:
    hosts = []
    if isinstance(member.of, TopologyLevel):
        inner = [m.of for m in member.of.members if isinstance(m.of, Device)]
        hosts = [device.host_link for device in inner if device.host_link is not None]
    return Uplink(
        link=link,
        ports=member.ports,
        ranks=ranks,
        devices=member.size,
        host_link=min(hosts, key=lambda host: host.bytes_per_second, default=None),
    )


def _part(group: Group, begin: int, count: int) -> Group:
    """The ranks among those ``count`` that begin there, counted from there."""
    chosen = group[bisect_left(group, begin) : bisect_left(group, begin + count)]
    return _moved(chosen, begin)


def _moved(group: Group, begin: int) -> Group:
    if isinstance(group, range):
        return range(group.start - begin, group.stop - begin, group.step)
    return tuple(rank - begin for rank in group)


def _shared_out(group: Group, size: int) -> Iterator[tuple[int, Group]]:
    """How many members of that size hold which pattern of ranks; a member without any is left out.

    Where a range meets equal members, all but the outer two look alike.
    """
    if not group:
        return
    first, last = group[0] // size, group[-1] // size
    if isinstance(group, range) and group.step % size == 0:
        offset = group[0] % size
        yield len(group), range(offset, offset + 1)
        return
    patterns: Counter[Group] = Counter()
    capture_and_price = range(first, last + 1)
    if isinstance(group, range) and size % group.step == 0 and len(capture_and_price) > 2:
        patterns[range(group[0] % group.step, size, group.step)] = len(capture_and_price) - 2
        capture_and_price = range(first, last + 1, last - first)
    for nth in capture_and_price:
        inner = _part(group, nth * size, size)
        patterns[_evenly(inner)] += 1 if inner else 0
    yield from ((count, inner) for inner, count in patterns.items() if inner)


def _evenly(group: Group) -> Group:
    """As a range from the first to just behind the last, where it is one."""
    if not group:
        return range(0)
    step = group[1] - group[0] if len(group) > 1 else 1
    if len(group) > 1 and group[-1] - group[0] != step * (len(group) - 1):
        return group
    even = range(group[0], group[-1] + 1, step)
    return even if isinstance(group, range) or tuple(even) == group else group
