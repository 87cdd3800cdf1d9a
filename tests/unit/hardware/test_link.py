"""Links: a curve over size, of which two figures are the simple case."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from steelyard.errors import BadInput
from steelyard.hardware.cluster import Link

SIZES = st.integers(0, 2**40)
POINTS = (
    st.lists(st.tuples(st.integers(1, 2**24), st.floats(1e-7, 1e-2)), min_size=2, max_size=8)
    .map(lambda steps: tuple(_summed(steps)))
)  # fmt: skip
PLAIN = st.builds(
    Link,
    kind=st.just("plain"),
    latency_seconds=st.floats(0, 1e-3),
    bytes_per_second=st.floats(1e6, 1e12),
)
CURVED = POINTS.map(lambda points: Link.curve(points, kind="curved"))


def _summed(steps: list[tuple[int, float]]) -> list[tuple[int, float]]:
    size, seconds, points = 0, 0.0, []
    for more, longer in steps:
        size, seconds = size + more, seconds + longer
        points.append((size, seconds))
    return points


@given(PLAIN | CURVED, SIZES, SIZES, st.integers(1, 100))
def test_more_bytes_are_never_faster(link: Link, size: int, more: int, messages: int) -> None:
    small = link.seconds(size, messages=messages)
    assert small <= link.seconds(size + more, messages=messages) * (1 + 1e-12)
    assert link.moving_seconds(size, messages=messages) >= -1e-12


@given(POINTS)
def test_a_curve_goes_through_its_points(points: tuple[tuple[int, float], ...]) -> None:
    link = Link.curve(points, kind="curved")
    for size, seconds in points:
        assert link.seconds(size, messages=1) == pytest.approx(seconds)
    assert link.seconds(0, messages=1) == points[0][1] == link.latency_seconds


@given(PLAIN, st.integers(1, 2**30))
def test_two_points_of_a_straight_line_are_the_plain_link(link: Link, size: int) -> None:
    assume(link.seconds(2 * size, messages=1) > link.seconds(size, messages=1))
    points = [(n, link.seconds(n, messages=1)) for n in (size, 2 * size)]
    curve = Link.curve(points, kind="curved")
    for factor in (1.0, 1.5, 2.0, 7.0):
        both = (link.seconds(factor * size, messages=1), curve.seconds(factor * size, messages=1))
        assert both[0] == pytest.approx(both[1], rel=1e-3)


@given(CURVED, st.integers(1, 2**20), st.integers(1, 50))
def test_messages_in_a_row_take_as_long_as_each_of_them(link: Link, size: int, n: int) -> None:
    whole = link.seconds(n * size, messages=n)
    assert whole == pytest.approx(n * link.seconds(size, messages=1))


def test_nothing_sent_takes_nothing() -> None:
    assert Link.curve([(1, 1.0), (2, 2.0)], kind="x").seconds(0, messages=0) == 0


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([(1, 1.0)], "two points"),
        ([(1, 1.0), (1, 2.0)], "sizes that decrease"),
        ([(2, 1.0), (1, 2.0)], "sizes that decrease"),
        ([(1, 2.0), (2, 1.0), (3, 4.0)], "times that decrease"),
        ([(1, 1.0), (2, 1.0)], "flat at its end"),
    ],
)
def test_an_invalid_curve_is_refused(points: list[tuple[int, float]], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        Link.curve(points, kind="x")
