"""The measured cost of a run, compared with its predicted cost.

Not for measuring: see measure/ and run/.
"""

from dataclasses import dataclass
from pathlib import Path

from steelyard.plans.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The peak memory of one rank; ``measured_bytes`` is None if no step was measured."""

    rank: int
    predicted_bytes: int
    measured_bytes: int | None = None

    @property
    def miss(self) -> float | None:
        """Relative error: measured divided by predicted, minus one."""
        if self.measured_bytes is None or not self.predicted_bytes:
            return None
        return self.measured_bytes / self.predicted_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasurement:
    """Measurements of a run; None for values that were not measured yet.

    ``steps`` counts all steps; the measuring process took those from ``first_step`` on. ``passes``
    counts its calls of ``step.backward`` in a user's own training loop. ``memory_bytes`` is the
    allocator's peak on the device in one measured step, ``rss_bytes`` the peak of the whole process
    as the operating system saw it. ``communication_bytes`` are the bytes sent to other ranks in a
    step, as the kernel counts them at the connections. ``ranks`` has the memory of each rank, if
    there are several. ``stands_in`` names the device that replaced the declared cluster of the
    plan, if any: the times are not those of that cluster.
    """

    steps: int = 0
    first_step: int = 1
    passes: int = 0
    memory_bytes: int | None = None
    rss_bytes: int | None = None
    communication_bytes: int | None = None
    communication_seconds: float | None = None
    computation_seconds: float | None = None
    step_seconds: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    ranks: tuple[RankMemory, ...] = ()
    stands_in: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A plan with its measurements; ``written`` is the path of a new plan made during the run, if
    any."""

    plan: Plan
    measured: RunMeasurement
    written: Path | None = None

    @property
    def memory_miss(self) -> float | None:
        """Relative error: measured divided by predicted, minus one."""
        measured = self.measured.memory_bytes
        predicted = self.plan.predicted.metrics.memory_bytes.value
        return None if measured is None or not predicted else measured / predicted - 1

    @property
    def time_miss(self) -> float | None:
        measured = self.measured.step_seconds
        predicted = self.plan.predicted.metrics.step_seconds.value
        return None if measured is None or not predicted else measured / predicted - 1
