"""A step on more and more devices, beside two laws: of a batch that stays, and of one that grows.

Amdahl (AFIPS 1967): of the time on the fewest devices a share does not shrink. Gustafson (CACM
31(5), 1988): of the time on more devices, with a batch grown alike, a share is the same whatever
their number. Not for what a step takes: see predict/.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One batch size on some devices; ``hours`` and ``usd`` are of the whole training, where its
    length and the price of a device are known."""

    layout: str
    samples: int
    step_seconds: float
    hours: float | None = None
    usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint:
    """None: no layout of so many devices divides the batch, or none fits."""

    devices: int
    same_batch: Run | None
    grown_batch: Run | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The first point, of the fewest devices, is what the others are compared with."""

    title: str
    cluster: str
    points: tuple[ScalePoint, ...]
    notes: tuple[str, ...] = ()

    def times(self, point: ScalePoint) -> float:
        """How many times the devices of the first point."""
        return point.devices / self.points[0].devices

    def speed_up(self, point: ScalePoint) -> float | None:
        """Of the same batch, beside the first point."""
        first = self.points[0].same_batch
        if first is None or point.same_batch is None:
            return None
        return first.step_seconds / point.same_batch.step_seconds

    def scaled_speed_up(self, point: ScalePoint) -> float | None:
        """Of samples a second, the batch grown with the devices."""
        first = self.points[0].grown_batch
        if first is None or point.grown_batch is None:
            return None
        rates = [run.samples / run.step_seconds for run in (first, point.grown_batch)]
        return rates[1] / rates[0]

    @property
    def serial_share(self) -> float:
        """Of the step on the fewest devices: what fits these speed-ups best."""
        found = ((self.times(p), self.speed_up(p)) for p in self.points)
        share = amdahl_share([(times, up) for times, up in found if up is not None])
        # More devices hold more, and may compute less again: they may be more than so many times
        # as fast, which no law of these two knows.
        return max(0.0, share)

    @property
    def constant_share(self) -> float:
        """Of the step on any number, the batch grown alike: what fits these speed-ups best."""
        found = ((self.times(p), self.scaled_speed_up(p)) for p in self.points)
        return max(0.0, gustafson_share([(times, up) for times, up in found if up is not None]))


def amdahl(times: float, share: float) -> float:
    return 1 / (share + (1 - share) / times)


def gustafson(times: float, share: float) -> float:
    return times - share * (times - 1)


def amdahl_share(found: Sequence[tuple[float, float]]) -> float:
    """By least squares of the times taken, from pairs of (times the devices, speed-up)."""
    rows = [(1 / up - 1 / times, 1 - 1 / times) for times, up in found]
    return _slope(rows)


def gustafson_share(found: Sequence[tuple[float, float]]) -> float:
    """By least squares of the speed-ups."""
    return _slope([(times - up, times - 1) for times, up in found])


def _slope(rows: Sequence[tuple[float, float]]) -> float:
    squares = sum(x * x for _, x in rows)
    return sum(y * x for y, x in rows) / squares if squares else 0.0
