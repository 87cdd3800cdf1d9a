"""The topology of a cluster: a tree of levels, such as device < node < rack.

A level lists its classes of members, how many there are of each, and the link between them. One
entry represents all equal nodes, so that 16,384 devices cost no more to describe than eight. Ranks
are numbered depth first. Not for the links that a group of ranks crosses: see
predict/collectives/group_topology.py.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from steelyard.errors import BadInput
from steelyard.hardware.device import Device
from steelyard.hardware.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelMember:
    """``count`` equal devices or levels, each joined to its siblings by ``ports`` links.

    If there is no link, this is the only member of its level.
    """

    of: "Device | TopologyLevel"
    count: int
    link: Link | None
    ports: int = 1

    @property
    def size(self) -> int:
        """The number of devices in one of the ``count`` members."""
        return self.of.num_devices if isinstance(self.of, TopologyLevel) else 1

    @property
    def num_devices(self) -> int:
        return self.count * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyLevel:
    """A level of the topology: its members with their links, and optionally a price for the
    whole.
    """

    name: str
    members: tuple[LevelMember, ...]
    own_usd_per_hour: float | None = None
    num_devices: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.members, "a scope has members"
        assert all(m.count > 0 and m.ports > 0 for m in self.members), (
            "the count of a member is positive"
        )
        alone = sum(m.count for m in self.members) == 1
        assert alone or all(m.link for m in self.members), "several members are joined by a link"
        object.__setattr__(self, "num_devices", sum(m.num_devices for m in self.members))

    @property
    def classes(self) -> tuple[tuple[Device, int], ...]:
        """The classes of device, each with its number of devices."""
        found: Counter[Device] = Counter()
        for member in self.members:
            inner = ((member.of, 1),) if isinstance(member.of, Device) else member.of.classes
            for device, count in inner:
                found[device] += count * member.count
        return tuple(found.items())

    @property
    def usd_per_hour(self) -> float | None:
        """The price of the whole; None if the price of any part is unknown."""
        if self.own_usd_per_hour is not None:
            return self.own_usd_per_hour
        prices = [(m.of.usd_per_hour, m.count) for m in self.members]
        known = [price * count for price, count in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    def usd_per_hour_of(self, num_devices: int) -> float | None:
        """Return the price of the first ``num_devices``; a level's own price is split evenly."""
        if self.own_usd_per_hour is not None:
            return self.own_usd_per_hour * num_devices / self.num_devices
        found, remaining = 0.0, num_devices
        for member in self.members:
            if not remaining:
                break
            priced = min(remaining, member.num_devices)
            remaining -= priced
            whole, partial = divmod(priced, member.num_devices // member.count)
            prices = [(member.of.usd_per_hour, whole)]
            if partial:
                assert isinstance(member.of, TopologyLevel), "a device has no members"
                prices.append((member.of.usd_per_hour_of(partial), 1))
            for price, count in prices:
                if count and price is None:
                    return None
                found += count * (price or 0.0)
        return found

    @property
    def identity(self) -> str:
        """All properties that a plan may depend on; names of levels and prices are excluded."""
        is_local = all(device.is_here for device, _ in self.classes)
        member_texts = []
        for member in self.members:
            link = member.link
            # Local links are measured again each time, so their rates do not identify the topology.
            link_identity = "" if link is None else link.kind if is_local else link.identity
            member_texts.append(
                f"{member.count}x{member.of.identity} by {member.ports}x{link_identity}"
            )
        return f"({', '.join(member_texts)})"

    def device_of(self, rank: int) -> Device:
        of = self.path_to(rank)[-1].of
        assert isinstance(of, Device)
        return of

    def path_to(self, rank: int) -> tuple[LevelMember, ...]:
        """Return the chain of members from this level down to the device of ``rank``."""
        self._check(rank)
        scope, path = self, []
        while True:
            member, rank = scope._member_of(rank)
            path.append(member)
            if isinstance(member.of, Device):
                return tuple(path)
            scope, rank = member.of, rank % member.size

    def holding(self, first: int, last: int) -> "LevelPosition":
        """Return the smallest level that contains all ranks from ``first`` to ``last``."""
        self._check(first)
        self._check(last)
        scope, begin = self, 0
        while True:
            member, offset = scope._member_of(first - begin)
            nth = offset // member.size
            inner_begin = first - offset + nth * member.size
            if isinstance(member.of, Device) or not inner_begin <= last < inner_begin + member.size:
                return LevelPosition(scope=scope, first_rank=begin)
            scope, begin = member.of, inner_begin

    def between(self, rank: int, other: int) -> tuple[LevelMember, LevelMember]:
        """Return the two members that contain the two ranks, at the lowest level common to both."""
        assert rank != other
        position = self.holding(min(rank, other), max(rank, other))
        mine, _ = position.scope._member_of(rank - position.first_rank)
        yours, _ = position.scope._member_of(other - position.first_rank)
        return mine, yours

    def blocks(self) -> Iterator[tuple[int, LevelMember]]:
        """Yield the first rank of each class of members, and the class."""
        begin = 0
        for member in self.members:
            yield begin, member
            begin += member.num_devices

    def _member_of(self, rank: int) -> tuple[LevelMember, int]:
        """Return the member class of ``rank``, and its rank number relative to the first of that
        class.
        """
        begin, member = next(
            (b, m) for b, m in self.blocks() if b <= rank < b + m.num_devices
        )  # fmt: skip
        return member, rank - begin

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.num_devices:
            raise BadInput(
                f"{self.name} has no rank {rank}",
                expected=f"a rank from 0 to {self.num_devices - 1}: {self.num_devices} devices",
                remedy="name fewer ranks, or declare a larger cluster",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPosition:
    """A single level of a class: the one whose devices begin at ``first_rank``."""

    scope: TopologyLevel
    first_rank: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.scope.num_devices)
