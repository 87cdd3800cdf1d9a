"""What passes between the ranks of a group, gate by gate: how often it waits, how long it moves.

A transfer waits once for the slowest gate on its way and moves at the pace of the slowest; gates of
different members work side by side. Where other groups like this one exchange at the same time,
they share the ports that they have in common. Not for who sends what: see algorithms.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2

from steelyard.hardware.topology import TopologyLevel
from steelyard.predict.collectives.group_topology import Level, Uplink, levels


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteStage:
    """One level of scopes at which ranks of the group meet, and all that is passed to get there.

    ``behind`` is how many ranks of the group one scope of this level holds at most, and ``inside``
    how many one of its members does. ``inner`` gates lead no further than this level.
    """

    level: Level
    inside: int
    behind: int
    inner: tuple[Uplink, ...]
    outward: tuple[Uplink, ...]

    @property
    def gates(self) -> tuple[Uplink, ...]:
        return (*self.inner, *self.outward)

    @property
    def latency_seconds(self) -> float:
        """Of one hop that meets here."""
        hosts = [g.host_link.latency_seconds for g in self.gates if g.host_link is not None]
        return max([*(gate.link.latency_seconds for gate in self.gates), *hosts], default=0.0)

    @property
    def depth(self) -> int:
        """Of a binary tree over the members of one scope."""
        return ceil(log2(self.level.most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where the ranks of a group meet, from inner to outer; ``at_once`` groups like it exchange."""

    num_ranks: int
    stages: tuple[RouteStage, ...]
    at_once: int = 1

    @property
    def doubt(self) -> float:
        """Of the link that is known least."""
        return max((gate.link.doubt for gate in self.gates()), default=0.0)

    @property
    def hop_seconds(self) -> float:
        """What the hops from rank to rank along the group wait."""
        return sum(stage.level.hops * stage.latency_seconds for stage in self.stages)

    @property
    def depth_seconds(self) -> float:
        """What the hops down a tree of trees wait, one for each level."""
        return sum(stage.depth * stage.latency_seconds for stage in self.stages)

    def gates(self) -> Iterator[Uplink]:
        """Each once. What leads outward from one level is passed to all further ones."""
        for stage in self.stages:
            yield from stage.inner
        if self.stages:
            yield from self.stages[-1].outward

    def moving_seconds(
        self, gate: Uplink, nbytes: float, *, streams: int | None = None, messages: int = 1
    ) -> float:
        """So many bytes through a gate, from so many of its ranks (all, unless said) at once."""
        streams = gate.ranks if streams is None else streams
        ports = usable_ports(gate, streams=streams, at_once=self.at_once)
        taken = gate.link.moving_seconds(nbytes / ports, messages=messages)
        if gate.host_link is None:
            return taken
        # No more devices send than the ports take.
        hosts = min(streams, max(1.0, ports))
        return max(taken, gate.host_link.moving_seconds(nbytes / hosts, messages=messages))


def usable_ports(gate: Uplink, *, streams: int, at_once: int) -> float:
    """A device drives its even share of the ports, and one at least; groups divide them."""
    sharing = min(at_once, max(1, gate.devices // gate.ranks))
    each = max(1.0, gate.ports / gate.devices)
    return min(streams * each, gate.ports / sharing)


def route(cluster: TopologyLevel, ranks: Sequence[int], *, at_once: int = 1) -> Route:
    """``at_once``: as many groups of as many ranks each, this one among them."""
    assert at_once >= 1
    found = levels(cluster, ranks)
    stages = []
    inside, outward = 1, dict[Uplink, None]()
    for number, level in enumerate(found):
        further = found[number + 1].gates if number + 1 < len(found) else ()
        behind = max((gate.ranks for gate in further), default=len(ranks))
        outward |= dict.fromkeys(level.outward)
        if level.most > 1:
            inner = tuple(gate for gate in level.gates if gate not in level.outward)
            stages.append(
                RouteStage(
                    level=level, inside=inside, behind=behind, inner=inner, outward=tuple(outward)
                )
            )
            inside = behind
    return Route(num_ranks=len(ranks), stages=tuple(stages), at_once=at_once)
