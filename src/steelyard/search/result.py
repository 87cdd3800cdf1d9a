"""What a search answers: a program, what was taken and refused for it, the curve it lies on.

Not for finding it: see search/single/search.py.
"""

from dataclasses import dataclass

from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.plans.peak_memory import PeakMemory
from steelyard.plans.plan import FrontierPoint, NextCent, Prediction, SelectedTrade
from steelyard.plans.trade import Rejection
from steelyard.units import format_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far from the fastest this can be: a proven bound, for these costs and no others.

    It holds for plans that only recompute, in the captured order and each value at most once more
    (with ``is_often`` any number of times), or move it to offload memory where there is one, or
    keep it in 8 bits where that is allowed, on the same number of micro-batches.
    """

    step_seconds: float
    least_seconds: float
    is_often: bool = False
    has_offload_memory: bool = False
    has_codes: bool = False

    @property
    def share(self) -> float:
        return self.step_seconds / self.least_seconds - 1 if self.least_seconds else 0.0

    def __str__(self) -> str:
        others = [
            f" or {how}"
            for how, is_there in (
                ("moving it to offload memory", self.has_offload_memory),
                ("keeping it in 8 bits", self.has_codes),
            )
            if is_there
        ]
        once = "" if self.is_often else " each value at most once"
        near = f"within {format_share(self.share).lstrip('+')} of"
        if self.share >= 1:  # the bound knows nothing of how slow offload memory is
            near = f"at most {1 + self.share:.1f} times"
        return f"{near} the fastest possible by recomputing{once}{''.join(others)}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchResult:
    """``least`` is the peak of the smallest plan known: the least memory this step can run in.

    It was looked for in at most ``least_within`` micro-batches; 0 where finer ones were tried too.
    """

    program: Program
    rules: tuple[Rule, ...]
    prediction: Prediction
    micro_batches: int
    taken: tuple[SelectedTrade, ...]
    refused: tuple[Rejection, ...]
    num_offers: int
    frontier: tuple[FrontierPoint, ...]
    least: PeakMemory
    least_within: int
    next_cent: NextCent | None
    gap: Gap | None

    def why_not(self, trade: str) -> tuple[Rejection, ...]:
        """Why this trade, or the offer with this label, was not applied (or not all of it)."""
        return tuple(r for r in self.refused if trade in (r.trade, r.label) or _names(r, trade))


def _names(refusal: Rejection, wanted: str) -> bool:
    """``blocks.*.mlp`` names the offer ``blocks.*.mlp (12)``."""
    return refusal.label.rpartition(" (")[0] == wanted
