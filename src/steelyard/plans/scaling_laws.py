"""Scaling of a step over more devices, compared with Amdahl's and Gustafson's laws.

Amdahl (AFIPS 1967): with the same batch, a share of the time on the fewest devices does not shrink.
Gustafson (CACM 31(5), 1988): if the batch grows with the devices, a constant share of the time does
not grow with it, on any number of devices. Not for predicting a step: see predict/.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The predictions for one batch size on a number of devices.

    ``hours`` and ``usd`` are for the whole training, if its length and the price of a device are
    known.
    """

    layout: str
    samples: int
    step_seconds: float
    hours: float | None = None
    usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint:
    """The runs on one number of devices; None if no layout divides the batch, or if none fits."""

    devices: int
    same_batch: Run | None
    grown_batch: Run | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The runs on increasing numbers of devices; the first point is the baseline."""

    title: str
    cluster: str
    points: tuple[ScalePoint, ...]
    notes: tuple[str, ...] = ()

    def times(self, point: ScalePoint) -> float:
        """Return the number of devices relative to the first point."""
        return point.devices / self.points[0].devices

    def speed_up(self, point: ScalePoint) -> float | None:
        """Return the speed-up on the same batch, relative to the first point."""
        first = self.points[0].same_batch
        if first is None or point.same_batch is None:
            return None
        return first.step_seconds / point.same_batch.step_seconds

    def scaled_speed_up(self, point: ScalePoint) -> float | None:
        """Return the speed-up in samples per second if the batch grows with the devices."""
        first = self.points[0].grown_batch
        if first is None or point.grown_batch is None:
            return None
        rates = [run.samples / run.step_seconds for run in (first, point.grown_batch)]
        return rates[1] / rates[0]

    @property
    def serial_share(self) -> float | None:
        """The best-fitting share of the step on the fewest devices that does not shrink.

        None if Amdahl's law does not describe these speed-ups.
        """
        return _fitted_share(amdahl_share, [(self.times(p), self.speed_up(p)) for p in self.points])

    @property
    def constant_share(self) -> float | None:
        """The best-fitting share of the step that does not grow with the batch and the devices.

        None if Gustafson's law does not describe these speed-ups.
        """
        found = [(self.times(p), self.scaled_speed_up(p)) for p in self.points]
        return _fitted_share(gustafson_share, found)

    @property
    def slowest_of_the_same_batch(self) -> ScalePoint | None:
        """The point with the longest step on the same batch; None if the first is longest."""
        return self._slowest(self.speed_up)

    @property
    def slowest_of_the_grown_batch(self) -> ScalePoint | None:
        """The point with the fewest samples per second, if they are fewer than at the first; else
        None.
        """
        return self._slowest(self.scaled_speed_up)

    def _slowest(self, speed_up: Callable[[ScalePoint], float | None]) -> ScalePoint | None:
        found = [(up, p) for p in self.points if (up := speed_up(p)) is not None and up < 1]
        return min(found, key=lambda pair: pair[0])[1] if found else None


def _fitted_share(
    law: Callable[[Sequence[tuple[float, float]]], float],
    points: Sequence[tuple[float, float | None]],
) -> float | None:
    """Return the share that fits best; None if there are fewer than two points, or if it exceeds
    one.

    It exceeds one if more devices are slower than the first ones. Both laws describe work that
    does not shrink, but not communication that grows.
    """
    found = [(times, up) for times, up in points if up is not None]
    if len(found) < 2:
        return None
    share = law(found)
    if share > 1 + _ROUNDING:
        return None
    # More devices have more memory and may recompute less. The speed-up may therefore exceed their
    # number, which neither law describes.
    return min(1.0, max(0.0, share))


def check_devices(cluster: Cluster, fewest: int, most: int) -> None:
    if not 1 <= fewest <= most <= cluster.num_devices:
        raise BadInput(
            f"devices {fewest}..{most} are not in a cluster of {cluster.num_devices}",
            expected=f"a range from 1 to {cluster.num_devices}, with the smaller number first",
            remedy="name fewer devices, or declare a larger cluster",
        )


def amdahl(times: float, share: float) -> float:
    return 1 / (share + (1 - share) / times)


def gustafson(times: float, share: float) -> float:
    return times - share * (times - 1)


def amdahl_share(found: Sequence[tuple[float, float]]) -> float:
    """Return the share with the least-squares fit of the times, from pairs of (times the devices,
    speed-up).
    """
    rows = [(1 / up - 1 / times, 1 - 1 / times) for times, up in found]
    return _slope(rows)


def gustafson_share(found: Sequence[tuple[float, float]]) -> float:
    """Return the share with the least-squares fit of the speed-ups."""
    return _slope([(times - up, times - 1) for times, up in found])


def _slope(rows: Sequence[tuple[float, float]]) -> float:
    squares = sum(x * x for _, x in rows)
    return sum(y * x for y, x in rows) / squares if squares else 0.0
