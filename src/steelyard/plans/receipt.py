"""What a run cost beside what it was predicted to cost.

Not for measuring: see measure/ and run/.
"""

from dataclasses import dataclass
from pathlib import Path

from steelyard.plans.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The peak of one rank's memory; ``measured_bytes`` is None where no step was metered."""

    rank: int
    predicted_bytes: int
    measured_bytes: int | None = None

    @property
    def miss(self) -> float | None:
        """Measured over predicted, less one."""
        if self.measured_bytes is None or not self.predicted_bytes:
            return None
        return self.measured_bytes / self.predicted_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasurement:
    """Figures of a run; None where nothing was measured yet.

    ``steps`` were taken in all, and those from ``first_step`` on by the process that measured; in
    them were ``passes`` calls of ``step.backward``, in a loop of the user's own.
    ``memory_bytes`` is what the device's allocator held at the peak of one metered step;
    ``rss_bytes`` what the operating system saw of the whole process. ``communication_bytes`` went
    to other ranks in a step, by the kernel's count of what was handed to connections. ``ranks``
    has each rank's memory, where there are several. ``stands_in`` says which device stood in for
    which declared cluster, of a plan that was made for one: its times are not that cluster's.
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
    """A plan and what became of it; ``written``: where it is, if it took another one's place."""

    plan: Plan
    measured: RunMeasurement
    written: Path | None = None

    @property
    def memory_miss(self) -> float | None:
        """Measured over predicted, less one."""
        measured = self.measured.memory_bytes
        predicted = self.plan.predicted.metrics.memory_bytes.value
        return None if measured is None or not predicted else measured / predicted - 1

    @property
    def time_miss(self) -> float | None:
        measured = self.measured.step_seconds
        predicted = self.plan.predicted.metrics.step_seconds.value
        return None if measured is None or not predicted else measured / predicted - 1
