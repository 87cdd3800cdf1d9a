"""Artificial clusters that are small enough to count by hand. Not for the figures of presets."""

from __future__ import annotations

from hypothesis import strategies as st

from steelyard.hardware.cluster import Device, LevelMember, Link, TopologyLevel

DEVICES = tuple(
    Device(kind=kind, flops_per_second=rate, bytes_per_second=rate, memory_bytes=1 << 30)
    for kind, rate in (("quick", 2e12), ("slow", 1e12))
)
PLAIN = st.builds(
    Link,
    kind=st.sampled_from(["a", "b"]),
    latency_seconds=st.floats(1e-7, 1e-4),
    bytes_per_second=st.floats(1e8, 1e12),
)


def _curve(latency: float, bends: list[tuple[int, float]]) -> Link:
    points, size, seconds = [(1024, latency)], 1024, latency
    for factor, rate in bends:
        seconds += size * (factor - 1) / rate
        size *= factor
        points.append((size, seconds))
    return Link.curve(points, kind="curved")


CURVED = st.builds(
    _curve,
    st.floats(1e-7, 1e-4),
    st.lists(st.tuples(st.integers(2, 64), st.floats(1e8, 1e12)), min_size=1, max_size=4),
)
LINKS = PLAIN | CURVED


def member(of: Device | TopologyLevel, count: int, link: Link, ports: int = 1) -> LevelMember:
    return LevelMember(of=of, count=count, link=link, ports=ports)


def even(*counts: int, links: tuple[Link, ...], ports: tuple[int, ...] = ()) -> TopologyLevel:
    """Return a tree with equal members on each level: ``even(8, 4, ...)`` is four nodes of eight
    devices."""
    of: Device | TopologyLevel = DEVICES[0]
    for level, (count, link) in enumerate(zip(counts, links, strict=True)):
        many = ports[level] if ports else 1
        of = TopologyLevel(name=f"level {level}", members=(member(of, count, link, many),))
    assert isinstance(of, TopologyLevel)
    return of


def _scopes(inner: st.SearchStrategy[Device | TopologyLevel]) -> st.SearchStrategy[TopologyLevel]:
    members = st.lists(
        st.builds(
            LevelMember, of=inner, count=st.integers(1, 4), link=LINKS, ports=st.integers(1, 4)
        ),
        min_size=1,
        max_size=3,
    ).map(tuple)
    return st.builds(TopologyLevel, name=st.sampled_from(["x", "y"]), members=members)


ANY = _scopes(st.sampled_from(DEVICES) | _scopes(st.sampled_from(DEVICES) | _scopes(
    st.sampled_from(DEVICES)
)))  # fmt: skip


def flat(scope: TopologyLevel) -> list[tuple[tuple[str, int], ...]]:
    """Return the path to each device by rank, as a list, where the code only counts."""
    found: list[tuple[tuple[str, int], ...]] = []
    for nth_class, inner in enumerate(scope.members):
        for nth in range(inner.count):
            here = (f"{nth_class}:{nth}", id(inner))
            if isinstance(inner.of, Device):
                found.append((here,))
            else:
                found += [(here, *way) for way in flat(inner.of)]
    return found
