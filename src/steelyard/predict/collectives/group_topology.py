"""The topology of a group of ranks: its members and their uplinks, level by level.

Equal patterns of ranks are processed once, so a group on 2,048 equal nodes takes no more work than
one on two. Not for the cost of a collective: see predict/collectives/algorithms.py.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from steelyard.errors import BadInput
from steelyard.hardware.device import Device
from steelyard.hardware.link import Link
from steelyard.hardware.topology import LevelMember, TopologyLevel

# A group is sorted, and it is a range if its steps are even, so that equal patterns compare equal.
Group = range | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Uplink:
    """The uplink of one member of a scope, with the number of ranks behind it.

    ``devices`` counts all devices behind it, ``ranks`` those in the group. ``host_link`` is the
    link of a device to the ports of its own node.
    """

    link: Link
    ports: int
    ranks: int
    devices: int
    host_link: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The scopes at one height of the cluster's tree that contain ranks of a group.

    ``members`` counts the members that have ranks of the group, in all scopes together; ``fewest``
    and ``most`` count those in one scope. ``uplinks`` are the distinct uplinks of these members;
    ``outward`` are those that traffic to other scopes also uses.
    """

    name: str
    scopes: int
    members: int
    fewest: int
    most: int
    uplinks: tuple[Uplink, ...]
    outward: tuple[Uplink, ...]

    @property
    def hops(self) -> int:
        """The number of hops through these scopes along the group, from rank to rank."""
        return self.members - self.scopes

    @property
    def is_even(self) -> bool:
        return self.fewest == self.most


def group_of(ranks: Sequence[int]) -> Group:
    """Return the ranks sorted; raise BadInput if a rank is listed twice."""
    if isinstance(ranks, range) and ranks.step > 0:
        return ranks
    sorted_ranks = tuple(sorted(ranks))
    if len(set(sorted_ranks)) < len(sorted_ranks):
        raise BadInput(
            "a group lists a rank twice",
            expected="each rank once",
            remedy="remove the duplicate rank",
        )
    return _evenly(sorted_ranks)


def levels(cluster: TopologyLevel, ranks: Sequence[int]) -> tuple[Level, ...]:
    """Return the levels of a group, from inner to outer, up to the scope that contains it."""
    group = group_of(ranks)
    if not group:
        return ()
    place = cluster.holding(group[0], group[-1])
    found: dict[int, _LevelBuilder] = {}
    _collect(place.scope, _shifted(group, place.first_rank), times=1, found=found)
    return tuple(found[height].level() for height in sorted(found))


@dataclass(slots=True)
class _LevelBuilder:
    """An accumulator for the scopes of one level."""

    names: dict[str, None] = field(default_factory=dict)
    scopes: int = 0
    joined: list[tuple[int, int]] = field(default_factory=list)
    uplinks: dict[Uplink, None] = field(default_factory=dict)
    outward: dict[Uplink, None] = field(default_factory=dict)

    def level(self) -> Level:
        return Level(
            name=" and ".join(self.names),
            scopes=self.scopes,
            members=sum(members * times for members, times in self.joined),
            fewest=min(members for members, _ in self.joined),
            most=max(members for members, _ in self.joined),
            uplinks=tuple(self.uplinks),
            outward=tuple(self.outward),
        )


def _collect(
    scope: TopologyLevel, group: Group, *, times: int, found: dict[int, _LevelBuilder]
) -> int:
    """Add a scope and the scopes inside it to ``found``; return its height. Devices have none."""
    height, joined, uplinks = 1, 0, list[tuple[Uplink, bool]]()
    for begin, member in scope.blocks():
        for count, inner in _patterns(_part(group, begin, member.num_devices), member.size):
            joined += count
            if member.link is not None:
                uplinks.append((_uplink(member, member.link, len(inner)), member.size > 1))
            if isinstance(member.of, TopologyLevel):
                inner_times = times * count
                height = max(height, 1 + _collect(member.of, inner, times=inner_times, found=found))
    level = found.setdefault(height, _LevelBuilder())
    level.names[scope.name] = None
    level.scopes += times
    level.joined.append((joined, times))
    for uplink, leads_on in uplinks:
        level.uplinks[uplink] = None
        if leads_on:
            level.outward[uplink] = None
    return height


def _uplink(member: LevelMember, link: Link, ranks: int) -> Uplink:
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
    """Return which of the ``count`` ranks from ``begin`` on are in the group, counted from
    ``begin``.
    """
    chosen = group[bisect_left(group, begin) : bisect_left(group, begin + count)]
    return _shifted(chosen, begin)


def _shifted(group: Group, begin: int) -> Group:
    if isinstance(group, range):
        return range(group.start - begin, group.stop - begin, group.step)
    return tuple(rank - begin for rank in group)


def _patterns(group: Group, size: int) -> Iterator[tuple[int, Group]]:
    """Yield the distinct patterns of ranks in members of that size, with the number of such
    members.

    Members without a rank are left out. For a range of ranks, all equal members except the first
    and the last have equal patterns.
    """
    if not group:
        return
    first, last = group[0] // size, group[-1] // size
    if isinstance(group, range) and group.step % size == 0:
        offset = group[0] % size
        yield len(group), range(offset, offset + 1)
        return
    patterns: Counter[Group] = Counter()
    members = range(first, last + 1)
    if isinstance(group, range) and size % group.step == 0 and len(members) > 2:
        patterns[range(group[0] % group.step, size, group.step)] = len(members) - 2
        members = range(first, last + 1, last - first)
    for nth in members:
        inner = _part(group, nth * size, size)
        patterns[_evenly(inner)] += 1 if inner else 0
    yield from ((count, inner) for inner, count in patterns.items() if inner)


def _evenly(group: Group) -> Group:
    """Return the group as a range, from its first rank to one past its last, if it is a range."""
    if not group:
        return range(0)
    step = group[1] - group[0] if len(group) > 1 else 1
    if len(group) > 1 and group[-1] - group[0] != step * (len(group) - 1):
        return group
    even = range(group[0], group[-1] + 1, step)
    return even if isinstance(group, range) or tuple(even) == group else group
