"""A step on more and more devices, beside two laws: of a batch that stays, and of one that grows.

Amdahl (AFIPS 1967): of the time on the fewest devices a share does not shrink. Gustafson (CACM
31(5), 1988): of the time on more devices, with a batch grown alike, a share is the same whatever
their number. Not for what a step takes: see predict/.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster

_ROUNDING = 1e-9


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
    def serial_share(self) -> float | None:
        """The share of the step on the fewest devices that does not shrink, as fits best; None
        where Amdahl's law says nothing of these speed-ups.
        """
        return _share_of(amdahl_share, [(self.times(p), self.speed_up(p)) for p in self.points])

    @property
    def constant_share(self) -> float | None:
        """The share of the step on any number that does not grow with the batch, as fits best; None
        where Gustafson's law says nothing of these speed-ups.
        """
        found = [(self.times(p), self.scaled_speed_up(p)) for p in self.points]
        return _share_of(gustafson_share, found)

    @property
    def slowest_of_the_same_batch(self) -> ScalePoint | None:
        """The point on which the batch takes longest, where it takes longer than on the first."""
        return self._slowest(self.speed_up)

    @property
    def slowest_of_the_grown_batch(self) -> ScalePoint | None:
        """The point that takes fewest samples a second, where these are fewer than on the first."""
        return self._slowest(self.scaled_speed_up)

    def _slowest(self, speed_up: Callable[[ScalePoint], float | None]) -> ScalePoint | None:
        found = [(up, p) for p in self.points if (up := speed_up(p)) is not None and up < 1]
        return min(found, key=lambda pair: pair[0])[1] if found else None


def _share_of(
    law: Callable[[Sequence[tuple[float, float]]], float],
    points: Sequence[tuple[float, float | None]],
) -> float | None:
    """None of fewer than two points, and where more devices are slower than the first ones: both
    laws know of work that does not shrink, and not of exchanges that grow."""
    found = [(times, up) for times, up in points if up is not None]
    if len(found) < 2:
        return None
    share = law(found)
    if share > 1 + _ROUNDING:
        return None
    # More devices hold more, and may compute less again: they may be more than so many times as
    # fast, which no law of these two knows.
    return min(1.0, max(0.0, share))


def check_devices(cluster: Cluster, fewest: int, most: int) -> None:
    if not 1 <= fewest <= most <= cluster.num_devices:
        raise BadInput(
            f"devices {fewest}..{most} of a cluster of {cluster.num_devices}",
            expected=f"from 1 to {cluster.num_devices}, the fewer ones first",
            remedy="name fewer devices, or declare a larger cluster",
        )


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
