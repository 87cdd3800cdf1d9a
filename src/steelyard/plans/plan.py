"""A plan: the decisions, the model and machine they are for, and their predicted cost.

The decisions are in a TOML file that a person can edit; the rest is in a generated JSON file, see
plan_files/plan_file.py. Not for making plans: see search/.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from steelyard.hardware.cluster import OffloadMemory
from steelyard.ir.metrics import EXACT, Estimate, Metrics
from steelyard.ir.rule import Rule
from steelyard.plans.budget import Budget
from steelyard.plans.peak_memory import PeakMemory, Timeline
from steelyard.plans.trade import Rejection


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEntry:
    """One tensor of the global batch."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Fingerprints of the planned step, and of the software and hardware it was planned for.

    ``ranks`` are the available ranks, in equal numbers on each of ``hosts``. ``speeds`` are their
    relative speeds, of which the fastest is 1; empty if all are equal. ``declared`` describes the
    declared cluster for which the plan was made; it is empty if the plan is for the machine on
    which it was made.
    """

    model: str
    graph: str
    decomposition: str
    runner: str
    cluster: str
    torch: str
    batch: tuple[BatchEntry, ...]
    ranks: int = 1
    hosts: int = 1
    speeds: tuple[float, ...] = ()
    declared: str = ""

    @property
    def ranks_of_a_host(self) -> int:
        return self.ranks // self.hosts

    def hosts_of(self, ranks: int) -> int:
        """Return the number of hosts that contain the first ``ranks`` ranks."""
        return 1 if self.hosts == 1 else -(-ranks // self.ranks_of_a_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The full contents of a plan file; everything else follows from it.

    ``offload_memory`` is the memory to which values are offloaded, if any. ``used_ranks`` are the
    ranks of ``target`` that run the step, unless these are simply the first ones.
    """

    target: Target
    budget: Budget
    rules: tuple[Rule, ...] = ()
    offload_memory: OffloadMemory | None = None
    used_ranks: tuple[int, ...] = ()

    def ranks_used(self, num_ranks: int) -> Sequence[int]:
        """Return the numbers of the ranks that run the step, among all ranks of ``target``.

        The result is a range if possible: a plan file may declare any number of ranks, and a list
        of so many might not fit in memory.
        """
        return self.used_ranks or range(num_ranks)

    def hosts_used(self, num_ranks: int) -> Sequence[int]:
        """Return the numbers of the hosts of these ranks."""
        each = self.target.ranks_of_a_host
        named = tuple(dict.fromkeys(rank // each for rank in self.used_ranks))
        return named or range(self.target.hosts_of(num_ranks))

    @property
    def name(self) -> str:
        """Four hexadecimal digits that name the decisions in printed output."""
        rules = " ".join(rule.text for rule in sorted(self.rules))
        offloaded = self.offload_memory or ""
        text = f"{self.target.graph}{self.target.runner}{self.budget}{rules}{offloaded}"
        text += str(self.used_ranks or "")
        return sha256(text.encode()).hexdigest()[:4]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The cost of one program: the four amounts, the tensors at the memory peak, and the
    timeline.
    """

    metrics: Metrics
    peak: PeakMemory
    flops: int
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedTrade:
    """An offer that was applied, with its cost and benefit relative to the plan without it.

    ``buys_seconds`` are seconds of computation if the trade saves any, and otherwise seconds of
    exposed communication (gradient codecs).
    """

    trade: str
    label: str
    rules: tuple[Rule, ...]
    buys_bytes: int
    pays_seconds: float
    buys_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One plan of the memory-time curve; a lossy plan that was not probed has unknown accuracy."""

    memory_bytes: int
    step_seconds: float
    flops: int
    micro_batches: int
    rules: tuple[Rule, ...]
    accuracy_loss: str = EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCent:
    """The marginal saving: ``more_bytes`` more memory would save ``saved_seconds`` per step."""

    more_bytes: int
    saved_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions with their reasons, and three predictions: eager, unplanned, and the plan.

    ``before`` is eager PyTorch, ``unplanned`` the captured graph with no trade applied.
    ``slowdown`` is the plan's time relative to the unplanned graph, forward and backward pass
    without the optimizer step. ``largest`` or ``fewest`` answers the inverse question if it was
    asked. ``least_bytes`` is the lowest peak that was found with at most ``least_within``
    micro-batches; ``least_within`` is 0 if larger counts were tried as well. If the reasons were
    computed before the prediction here, ``planned_seconds`` is the step time that was predicted
    then; offers, curve and marginal saving refer to that earlier prediction. ``predicted_for`` is a
    digest of the step, machine and optimizer that were predicted.
    """

    title: str
    decisions: Decisions
    before: Prediction
    unplanned: Prediction
    predicted: Prediction
    taken: tuple[SelectedTrade, ...] = ()
    refused: tuple[Rejection, ...] = ()
    num_offers: int = 0
    frontier: tuple[FrontierPoint, ...] = ()
    next_cent: NextCent | None = None
    least_bytes: int = 0
    least_within: int = 0
    slowdown: Estimate | None = None
    planned_seconds: float | None = None
    largest: str = ""
    fewest: str = ""
    predicted_for: str = ""
    notes: tuple[str, ...] = field(default=())
