"""The result of a search: the program, the trades applied and refused, and the memory-time curve.

Not for computing it: see search/single/search.py.
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
    """The distance of a plan from the fastest possible one, as a proven bound for these costs.

    The bound covers plans with the same number of micro-batches that keep the captured order. They
    may recompute each value once (with ``is_often`` any number of times), offload values if there
    is offload memory, and keep values in 8 bits if that is allowed.
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
        value = "them" if self.is_often else "it"
        alternatives = [
            f" or {action}"
            for action, is_allowed in (
                (f"offload {value}", self.has_offload_memory),
                (f"keep {value} in 8 bits", self.has_codes),
            )
            if is_allowed
        ]
        once = " values" if self.is_often else " each value at most once"
        distance = f"within {format_share(self.share).lstrip('+')} of"
        if self.share >= 1:  # the bound ignores the cost of offload transfers
            distance = f"at most {1 + self.share:.1f} times"
        return f"{distance} the lower bound for plans that recompute{once}{''.join(alternatives)}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchResult:
    """The plan for one budget, with the reasons for it.

    ``least`` is the smallest peak of all known plans. The search for it tried at most
    ``least_within`` micro-batches; 0 if it tried finer splits too. ``is_stopped`` says that a
    request ended the search.
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
    is_stopped: bool = False

    def why_not(self, trade: str) -> tuple[Rejection, ...]:
        """Return why this trade, or the offer with this label, was not applied in full."""
        return tuple(
            r for r in self.refused if trade in (r.trade, r.label) or _matches_label(r, trade)
        )


def _matches_label(refusal: Rejection, wanted: str) -> bool:
    """True if ``wanted`` is the label without its count.

    For example, ``blocks.*.mlp`` is the offer ``blocks.*.mlp (12)``.
    """
    return refusal.label.rpartition(" (")[0] == wanted
