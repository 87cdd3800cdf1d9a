"""Rejections of offers, in the same words for every search.

Not for finding out why an offer loses: the searches do that.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from steelyard.ir.rule import Rule, trade_name
from steelyard.ir.rule_kinds import SharedMemoryMessages
from steelyard.plans.trade import Rejection, Remaining
from steelyard.units import format_bytes, format_seconds

NOT_FASTER = "no plan that uses it is faster within the budget"
NOT_READ = "the backward pass does not read it in this plan"


@dataclass(frozen=True, slots=True)
class StepCosts:
    seconds: float
    nbytes: int

    def __str__(self) -> str:
        return f"{format_seconds(self.seconds)} a step and {format_bytes(self.nbytes)}"


def rejected(kind: type[Rule], label: str, reason: str) -> Rejection:
    """Return the rejection of an offer that could have been taken."""
    return Rejection(trade=trade_name(kind), label=label, reason=reason)


def impossible(kind: type[Rule], label: str, reason: str) -> Rejection:
    """Return the rejection of what cannot be offered; it is not counted among the offers."""
    return Rejection(trade=trade_name(kind), label=label, reason=reason, left=Remaining.NEVER)


def takes(
    seconds: float, plan_seconds: float, *, bound: str = "", reference: str = "the plan takes"
) -> str:
    """Return the step time of the alternative, compared with the plan's; ``bound`` is "at
    least"."""
    least = f"{bound} " if bound else ""
    return (
        f"takes {least}~{format_seconds(seconds)} a step; "
        f"{reference} ~{format_seconds(plan_seconds)}"
    )


def alone_takes(
    seconds: float, other_seconds: float, *, reference: str = "the whole plan takes"
) -> str:
    """Return a reason: the offer alone is slower or, if it is not, no plan with it is faster.

    Times that read alike give no reason for a choice, so the offer is said not to be needed.
    """
    if seconds >= other_seconds:
        if (same := format_seconds(seconds)) == format_seconds(other_seconds):
            return f"not needed: the plan fits without it, and a step takes the same ~{same}"
        return f"alone {takes(seconds, other_seconds, reference=reference)}"
    return NOT_FASTER


def without_shared_memory(
    label: str, *, is_possible: bool, tried: StepCosts | None, chosen: StepCosts
) -> Iterator[Rejection]:
    """Yield why messages do not go through shared memory; ``tried`` is the step with them."""
    if not is_possible:
        reason = "these ranks are not known to share memory or to reach each other's memory by RDMA"
        yield impossible(SharedMemoryMessages, label, reason)
    elif tried is not None:
        reason = f"would take ~{tried}; without it, a step takes ~{chosen}"
        yield rejected(SharedMemoryMessages, label, reason)
