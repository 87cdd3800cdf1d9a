"""A class of link: transfer seconds as a function of size.

Two figures are enough for most links: a latency and a rate. Measured or nonlinear links have a
list of points, interpolated linearly. Not for the devices that a link joins: see topology.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from steelyard.errors import BadInput

Point = tuple[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One class of link between devices, declared or measured; the rate is one way.

    ``doubt`` is the relative uncertainty of a transfer's time. ``call_seconds`` is the device time
    per message. ``disturbs`` is the share of a transfer's duration by which it delays concurrent
    work on the device. ``is_remote``: the link carries data to another host without CPU work on
    either host. ``is_even``: receive buffers have the same size on all ranks: that of the rank with
    the largest need. ``points`` are (bytes, seconds). With them, ``latency_seconds`` is the time of
    the first point and ``bytes_per_second`` the rate beyond the last: see ``curve``.
    """

    kind: str
    latency_seconds: float
    bytes_per_second: float
    doubt: float = 0.5
    call_seconds: float = 0.0
    disturbs: float = 0.0
    is_remote: bool = False
    is_even: bool = False
    points: tuple[Point, ...] = ()

    @classmethod
    def curve(
        cls,
        points: Sequence[Point],
        *,
        kind: str,
        doubt: float = 0.5,
        call_seconds: float = 0.0,
        disturbs: float = 0.0,
    ) -> "Link":
        """Return a link through ``points``: constant before the first, linear after the last."""
        _check(points)
        (before, earlier), (last, later) = points[-2:]
        return cls(
            kind=kind,
            latency_seconds=points[0][1],
            bytes_per_second=(last - before) / (later - earlier),
            doubt=doubt,
            call_seconds=call_seconds,
            disturbs=disturbs,
            points=tuple(points),
        )

    @property
    def identity(self) -> str:
        """All properties that a plan may depend on."""
        figures = (self.kind, self.latency_seconds, self.bytes_per_second, self.points)
        return repr(figures)

    def seconds(self, nbytes: float, *, messages: int) -> float:
        """Return the seconds for ``nbytes`` in equal messages that are sent one after the other."""
        if not self.points:
            return messages * self.latency_seconds + nbytes / self.bytes_per_second
        return messages * self._message_seconds(nbytes / messages) if messages else 0.0

    def moving_seconds(self, nbytes: float, *, messages: int) -> float:
        """Return the part of ``seconds`` that grows with the bytes, while the link is occupied."""
        return self.seconds(nbytes, messages=messages) - messages * self.latency_seconds

    def device_seconds(self, nbytes: int, *, messages: int) -> float:
        """Return the device time for ``messages`` messages with ``nbytes`` in total."""
        return messages * self.call_seconds + self.disturbs * nbytes / self.bytes_per_second

    def _message_seconds(self, nbytes: float) -> float:
        if nbytes <= self.points[0][0]:
            return self.latency_seconds
        for (size, seconds), (larger, longer) in pairwise(self.points):
            if nbytes <= larger:
                return seconds + (nbytes - size) * (longer - seconds) / (larger - size)
        size, seconds = self.points[-1]
        return seconds + (nbytes - size) / self.bytes_per_second


def _check(points: Sequence[Point]) -> None:
    wrong = ""
    if len(points) < 2:
        wrong = "has fewer than two points"
    for (size, seconds), (larger, longer) in pairwise(points):
        if larger <= size:
            wrong = f"has sizes that decrease, from {size} to {larger} bytes"
        elif longer < seconds:
            wrong = (
                f"has times that decrease: {larger} bytes take {longer:g} s, but {size} take "
                f"{seconds:g} s"
            )
    if not wrong and points[-1][1] <= points[-2][1]:
        wrong = "is flat at its end, so its bandwidth would be infinite"
    if wrong:
        raise BadInput(
            f"the curve of a link {wrong}",
            expected="increasing sizes, with increasing times",
            remedy='write it as [["4 KiB", "20 us"], ["1 MiB", "120 us"], ["64 MiB", "6 ms"]]',
        )
