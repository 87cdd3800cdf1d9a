"""A class of link: how long so many bytes take over it, as a curve over their size.

Two figures are enough for most: what the smallest transfer takes, and a rate. What was measured,
or bends, is a list of points with straight lines between. Not for what it joins: see topology.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from steelyard.errors import BadInput

Point = tuple[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One class of link between devices, declared or measured; the rate is one way.

    ``doubt`` is the share by which a transfer may take more or less than is said here.
    ``call_seconds`` is what the device itself spends on a message, and ``disturbs`` the share of
    the time that a transfer takes by which it slows what runs beside it.
    ``is_remote``: what one has written the link carries over to another host, without either.
    ``is_even``: for what others write here each makes as much room as the one that needs most.
    ``points`` are bytes and seconds; with them, ``latency_seconds`` is what the first takes and
    ``bytes_per_second`` the rate beyond the last: see ``curve``.
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
        """Straight lines through ``points``: level before the first, on as they ended."""
        _check(points)
        (before, begun), (last, end) = points[-2:]
        return cls(
            kind=kind,
            latency_seconds=points[0][1],
            bytes_per_second=(last - before) / (end - begun),
            doubt=doubt,
            call_seconds=call_seconds,
            disturbs=disturbs,
            points=tuple(points),
        )

    @property
    def identity(self) -> str:
        """All that a plan could depend on."""
        figures = (self.kind, self.latency_seconds, self.bytes_per_second, self.points)
        return repr(figures)

    def seconds(self, nbytes: float, *, messages: int) -> float:
        """So many bytes in so many equal messages, each sent when the one before has arrived."""
        if not self.points:
            return messages * self.latency_seconds + nbytes / self.bytes_per_second
        return messages * self._one(nbytes / messages) if messages else 0.0

    def moving_seconds(self, nbytes: float, *, messages: int) -> float:
        """What of that grows with the bytes: for so long the link is taken."""
        return self.seconds(nbytes, messages=messages) - messages * self.latency_seconds

    def device_seconds(self, nbytes: int, *, messages: int) -> float:
        """What so many messages take of the device."""
        return messages * self.call_seconds + self.disturbs * nbytes / self.bytes_per_second

    def _one(self, nbytes: float) -> float:
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
        wrong = f"has {len(points)} of the two points that it needs at least"
    for (size, seconds), (larger, longer) in pairwise(points):
        if larger <= size:
            wrong = f"goes back from {size} to {larger} bytes"
        elif longer < seconds:
            wrong = f"falls: {larger} bytes take {longer:g} s, and {size} take {seconds:g} s"
    if not wrong and points[-1][1] <= points[-2][1]:
        wrong = "is level at its end, as if more bytes took no time"
    if wrong:
        raise BadInput(
            f"the curve of a link {wrong}",
            expected="sizes that grow, and times that grow with them",
            remedy='write it as [["4 KiB", "20 us"], ["1 MiB", "120 us"], ["64 MiB", "6 ms"]]',
        )
