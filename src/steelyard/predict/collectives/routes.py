"""The latency and transfer time between the ranks of a group, uplink by uplink.

A transfer has the latency and the rate of the slowest uplink on its path; uplinks of different
members work in parallel. If other groups like this one exchange at the same time, they share the
ports that they have in common. Not for the pattern of messages: see algorithms.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2

from steelyard.hardware.topology import TopologyLevel
from steelyard.predict.collectives.group_topology import Level, Uplink, levels


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteStage:
    """One level at which ranks of the group meet, with all uplinks on the path to it.

    ``behind`` is the largest number of the group's ranks in one scope of this level, and ``inside``
    the largest number in one of its members. ``inner`` uplinks lead no further than this level.
    """

    level: Level
    inside: int
    behind: int
    inner: tuple[Uplink, ...]
    outward: tuple[Uplink, ...]

    @property
    def uplinks(self) -> tuple[Uplink, ...]:
        return (*self.inner, *self.outward)

    @property
    def latency_seconds(self) -> float:
        """The latency of one hop between ranks that meet at this level."""
        hosts = [g.host_link.latency_seconds for g in self.uplinks if g.host_link is not None]
        return max([*(uplink.link.latency_seconds for uplink in self.uplinks), *hosts], default=0.0)

    @property
    def depth(self) -> int:
        """The depth of a binary tree over the members of one scope."""
        return ceil(log2(self.level.most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The levels at which the ranks of a group meet, from inner to outer.

    ``at_once`` is the number of groups like it that exchange at the same time.
    """

    num_ranks: int
    stages: tuple[RouteStage, ...]
    at_once: int = 1

    @property
    def doubt(self) -> float:
        """The relative error of the least accurately known link."""
        return max((uplink.link.doubt for uplink in self.uplinks()), default=0.0)

    @property
    def hop_seconds(self) -> float:
        """The sum of the latencies of all hops along the group, from rank to rank."""
        return sum(stage.level.hops * stage.latency_seconds for stage in self.stages)

    @property
    def depth_seconds(self) -> float:
        """The sum of the latencies down a tree of trees, with one tree for each level."""
        return sum(stage.depth * stage.latency_seconds for stage in self.stages)

    def uplinks(self) -> Iterator[Uplink]:
        """Yield each uplink once; all outer levels also use the outward uplinks of inner levels."""
        for stage in self.stages:
            yield from stage.inner
        if self.stages:
            yield from self.stages[-1].outward

    def moving_seconds(
        self, uplink: Uplink, nbytes: float, *, streams: int | None = None, messages: int = 1
    ) -> float:
        """Return the seconds to move ``nbytes`` through an uplink.

        ``streams`` is the number of ranks that send at the same time, by default all behind the
        uplink.
        """
        streams = uplink.ranks if streams is None else streams
        ports = usable_ports(uplink, streams=streams, at_once=self.at_once)
        port_seconds = uplink.link.moving_seconds(nbytes / ports, messages=messages)
        if uplink.host_link is None:
            return port_seconds
        # The ports limit how many devices send at the same time.
        hosts = min(streams, max(1.0, ports))
        return max(port_seconds, uplink.host_link.moving_seconds(nbytes / hosts, messages=messages))


def usable_ports(uplink: Uplink, *, streams: int, at_once: int) -> float:
    """Return how many ports of an uplink a group can use.

    Each device uses its even share of the ports, and at least one; groups divide the ports among
    them.
    """
    sharing = min(at_once, max(1, uplink.devices // uplink.ranks))
    each = max(1.0, uplink.ports / uplink.devices)
    return min(streams * each, uplink.ports / sharing)


def route(cluster: TopologyLevel, ranks: Sequence[int], *, at_once: int = 1) -> Route:
    """Return the route of a group; ``at_once`` equal groups, including it, exchange at the same
    time.
    """
    assert at_once >= 1
    found = levels(cluster, ranks)
    stages = []
    inside, outward = 1, dict[Uplink, None]()
    for number, level in enumerate(found):
        further = found[number + 1].uplinks if number + 1 < len(found) else ()
        behind = max((uplink.ranks for uplink in further), default=len(ranks))
        outward |= dict.fromkeys(level.outward)
        if level.most > 1:
            inner = tuple(uplink for uplink in level.uplinks if uplink not in level.outward)
            stages.append(
                RouteStage(
                    level=level, inside=inside, behind=behind, inner=inner, outward=tuple(outward)
                )
            )
            inside = behind
    return Route(num_ranks=len(ranks), stages=tuple(stages), at_once=at_once)
