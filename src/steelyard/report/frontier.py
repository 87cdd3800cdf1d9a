"""The memory-time curve (Pareto front) of a plan, with the plan itself on it.

Not for drawing the curve: see svg.py and text.py.
"""

from dataclasses import dataclass

from steelyard.ir.metrics import EXACT
from steelyard.ir.rule import of_kind
from steelyard.ir.rule_kinds import MicroBatches
from steelyard.plans.plan import FrontierPoint, Plan, Prediction
from steelyard.report.quantities import Quantity, Unit, estimate_of, exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One plan of the memory-time curve; ``more_flops`` is relative to the graph without trades."""

    memory: Quantity
    step: Quantity
    more_flops: float
    micro_batches: int
    is_this_plan: bool
    accuracy_loss: str = EXACT


def curve_of(plan: Plan) -> tuple[CurvePoint, ...]:
    """Return the curve with this plan added: the curve is a sample and may not contain it."""
    points = list(plan.frontier)
    if points and not any(_is_of(plan, p) for p in points):
        points.append(_as_point(plan))
    return tuple(_point(p, plan) for p in sorted(points, key=_by_memory))


def _is_of(plan: Plan, point: FrontierPoint) -> bool:
    """True if the point has the plan's rules; times may differ between search and prediction."""
    return sorted(point.rules) == sorted(plan.decisions.rules)


def _as_point(plan: Plan) -> FrontierPoint:
    metrics, planned, rules = plan.predicted.metrics, plan.planned_seconds, plan.decisions.rules
    return FrontierPoint(
        memory_bytes=int(metrics.memory_bytes.value),
        step_seconds=metrics.step_seconds.value if planned is None else planned,
        flops=plan.predicted.flops,
        micro_batches=max((r.micro_batches for r in of_kind(rules, MicroBatches)), default=1),
        rules=rules,
        accuracy_loss=metrics.accuracy_loss,
    )


def _by_memory(point: FrontierPoint) -> tuple[int, float]:
    return (-point.memory_bytes, point.step_seconds)


def _point(point: FrontierPoint, plan: Plan) -> CurvePoint:
    flops, is_this = plan.unplanned.flops, _is_of(plan, point)
    this = plan.predicted.metrics.accuracy_loss
    return CurvePoint(
        memory=_predicted(point.memory_bytes, plan.predicted, "memory_bytes"),
        step=_predicted(point.step_seconds, plan.predicted, "step_seconds"),
        more_flops=point.flops / flops - 1 if flops else 0.0,
        micro_batches=point.micro_batches,
        is_this_plan=is_this,
        accuracy_loss=(this if is_this else point.accuracy_loss).partition(" (")[0],
    )


def _predicted(value: float, like: Prediction, key: str) -> Quantity:
    """Scale the plan's interval to a point; both come from the same predictor."""
    around = estimate_of(like.metrics, key)
    unit = Unit.BYTES if key == "memory_bytes" else Unit.SECONDS
    if not around.value:
        return exactly(value, unit)
    scale = value / around.value
    return Quantity(value=value, unit=unit, low=around.low * scale, high=around.high * scale)
