"""A plan: the decisions, for whom they were made, and what they were predicted to cost.

The decisions stand in a TOML file a person can edit; the rest in generated JSON beside it, see
plan_file.py. Not for making plans: see search/.
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
    """Fingerprints of what was planned, and with what; ``ranks`` are those it may lie on, as many
    on each of its ``hosts``, and ``speeds`` how fast each of them computes beside the fastest,
    where they are not equal. ``declared`` describes the declared cluster that was planned for;
    it is empty for a plan for the machine on which it was made."""

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
        """On how many of the hosts the first so many ranks are."""
        return 1 if self.hosts == 1 else -(-ranks // self.ranks_of_a_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """All that a plan file holds; everything else follows from it.

    ``offload_memory`` is the memory that values are moved to, where any are. ``used_ranks`` are the
    ranks of ``target`` that the step lies on, where these are not simply the first ones.
    """

    target: Target
    budget: Budget
    rules: tuple[Rule, ...] = ()
    offload_memory: OffloadMemory | None = None
    used_ranks: tuple[int, ...] = ()

    def ranks_used(self, num_ranks: int) -> Sequence[int]:
        """The numbers, among all ranks there were to choose from, of those it lies on; no list of
        more ranks than a plan file can name, which may say any number of them."""
        return self.used_ranks or range(num_ranks)

    def hosts_used(self, num_ranks: int) -> Sequence[int]:
        """And the numbers of the hosts that these are on."""
        each = self.target.ranks_of_a_host
        named = tuple(dict.fromkeys(rank // each for rank in self.used_ranks))
        return named or range(self.target.hosts_of(num_ranks))

    @property
    def name(self) -> str:
        """Four hexadecimal digits that name the decisions in print."""
        # A plan is called as it was before there were lags, times and buckets.
        rules = str(tuple(sorted(self.rules)))
        for unsaid in (
            ", lag=0, lead=0",
            ", times=1",
            ", bucket_bytes=0",
            ", dim=0, groups=1",
            ", shares=()",
        ):
            rules = rules.replace(unsaid, "")
        offloaded = self.offload_memory or ""
        text = f"{self.target.graph}{self.target.runner}{self.budget}{rules}{offloaded}"
        text += str(self.used_ranks or "")
        return sha256(text.encode()).hexdigest()[:4]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One program, priced: the four amounts, the peak behind the second, the step drawn out."""

    metrics: Metrics
    peak: PeakMemory
    flops: int
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedTrade:
    """An offer that was applied: what it pays and buys beside the plan without it.

    ``buys_seconds`` are of computation where it buys any; of codes, of waiting for others.
    """

    trade: str
    label: str
    rules: tuple[Rule, ...]
    buys_bytes: int
    pays_seconds: float
    buys_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One plan of the memory-time curve; a lossy one that was not probed is of unknown accuracy."""

    memory_bytes: int
    step_seconds: float
    flops: int
    micro_batches: int
    rules: tuple[Rule, ...]
    accuracy_loss: str = EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCent:
    """Which bound is worth raising: ``more_bytes`` more would save ``saved_seconds`` a step."""

    more_bytes: int
    saved_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions with their reasons. Three baselines are named: eager, unplanned, the plan.

    ``before`` is eager PyTorch, ``unplanned`` the captured graph with no trade applied.
    ``slowdown`` is how many times as long as the unplanned graph the plan takes, forward and
    backward pass without the optimizer's step. ``largest`` or ``fewest`` answers the inverse
    question where it was asked. ``least_bytes`` is the least peak that was found, with the batch in
    at most ``least_within`` parts; 0 where finer cuts were tried as well.
    ``planned_seconds`` is the step as it was predicted when the reasons were found, where that was
    at another time than the prediction here; offers, curve and next cent are beside that one.
    ``predicted_for`` is a digest of the step, machine and optimizer that were predicted.
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
