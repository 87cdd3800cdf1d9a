"""How devices are joined: a tree of scopes, such as device < node < rack, as counts of classes.

A scope says what it is made of and what joins its members; one class of node stands for as many as
there are, so that 16,384 devices cost no more than eight. Ranks are numbered through, depth first.
Not for what a group of ranks finds on its way: see predict/collectives/group_topology.py.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from steelyard.errors import BadInput
from steelyard.hardware.device import Device
from steelyard.hardware.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelMember:
    """``count`` devices or scopes of one class, each joined to its siblings by ``ports`` links.

    No link: the scope has no other member, and nothing to join it to.
    """

    of: "Device | TopologyLevel"
    count: int
    link: Link | None
    ports: int = 1

    @property
    def size(self) -> int:
        """How many devices one of them is."""
        return self.of.num_devices if isinstance(self.of, TopologyLevel) else 1

    @property
    def num_devices(self) -> int:
        return self.count * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyLevel:
    """What its members are and how they are joined. A price is of the whole, where one is said."""

    name: str
    members: tuple[LevelMember, ...]
    own_usd_per_hour: float | None = None
    num_devices: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.members, "a scope of nothing"
        assert all(m.count > 0 and m.ports > 0 for m in self.members), "a count of none"
        alone = sum(m.count for m in self.members) == 1
        assert alone or all(m.link for m in self.members), "nothing joins the members"
        object.__setattr__(self, "num_devices", sum(m.num_devices for m in self.members))

    @property
    def classes(self) -> tuple[tuple[Device, int], ...]:
        """Each class of device, with how many there are."""
        found: Counter[Device] = Counter()
        for member in self.members:
            inner = ((member.of, 1),) if isinstance(member.of, Device) else member.of.classes
            for device, count in inner:
                found[device] += count * member.count
        return tuple(found.items())

    @property
    def usd_per_hour(self) -> float | None:
        """None where the price of any part of it is not known."""
        if self.own_usd_per_hour is not None:
            return self.own_usd_per_hour
        prices = [(m.of.usd_per_hour, m.count) for m in self.members]
        known = [price * count for price, count in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    def usd_per_hour_of(self, num_devices: int) -> float | None:
        """Of so many devices from the first on; of a scope with a price of its own, their share."""
        if self.own_usd_per_hour is not None:
            return self.own_usd_per_hour * num_devices / self.num_devices
        found, left = 0.0, num_devices
        for member in self.members:
            if not left:
                break
            taken = min(left, member.num_devices)
            left -= taken
            whole, rest = divmod(taken, member.num_devices // member.count)
            prices = [(member.of.usd_per_hour, whole)]
            if rest:
                assert isinstance(member.of, TopologyLevel), "a device is whole"
                prices.append((member.of.usd_per_hour_of(rest), 1))
            for price, count in prices:
                if count and price is None:
                    return None
                found += count * (price or 0.0)
        return found

    @property
    def identity(self) -> str:
        """What makes plans differ: all but the names of scopes and what they cost to hire."""
        here = all(device.is_here for device, _ in self.classes)
        said = []
        for member in self.members:
            link = member.link
            # What runs here is measured, and measured anew.
            joined = "" if link is None else link.kind if here else link.identity
            said.append(f"{member.count}x{member.of.identity} by {member.ports}x{joined}")
        return f"({', '.join(said)})"

    def device_of(self, rank: int) -> Device:
        of = self.path_to(rank)[-1].of
        assert isinstance(of, Device)
        return of

    def path_to(self, rank: int) -> tuple[LevelMember, ...]:
        """From a member of this scope down to the device."""
        self._check(rank)
        scope, path = self, []
        while True:
            member, rank = scope._member_of(rank)
            path.append(member)
            if isinstance(member.of, Device):
                return tuple(path)
            scope, rank = member.of, rank % member.size

    def holding(self, first: int, last: int) -> "LevelPosition":
        """The smallest scope that holds these ranks and so all between them."""
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
        """What each of two ranks goes out by where their ways meet."""
        assert rank != other
        place = self.holding(min(rank, other), max(rank, other))
        mine, _ = place.scope._member_of(rank - place.first_rank)
        yours, _ = place.scope._member_of(other - place.first_rank)
        return mine, yours

    def blocks(self) -> Iterator[tuple[int, LevelMember]]:
        """Each class of member, with the rank at which its devices begin."""
        begin = 0
        for member in self.members:
            yield begin, member
            begin += member.num_devices

    def _member_of(self, rank: int) -> tuple[LevelMember, int]:
        """The class of member, and the rank counted from where that class begins."""
        begin, member = next(
            (b, m) for b, m in self.blocks() if b <= rank < b + m.num_devices
        )  # fmt: skip
        return member, rank - begin

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.num_devices:
            raise BadInput(
                f"there is no rank {rank} in {self.name}",
                expected=f"a rank from 0 to {self.num_devices - 1}: {self.num_devices} devices",
                remedy="name fewer ranks, or declare a larger cluster",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPosition:
    """One scope of its class: the one whose devices begin at ``first_rank``."""

    scope: TopologyLevel
    first_rank: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.scope.num_devices)
