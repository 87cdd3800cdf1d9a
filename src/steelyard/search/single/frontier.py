"""The memory-time curve over all explored variants, and the distance of a plan to its bounds.

Not for the front itself: see search/pareto_front.py. Not for the lower bound: see lower_bound.py.
"""

from steelyard.ir.metrics import EXACT, UNKNOWN
from steelyard.plans.budget import Budget
from steelyard.plans.plan import FrontierPoint, NextCent
from steelyard.search.pareto_front import ParetoFront, Point
from steelyard.search.result import Gap
from steelyard.search.single.lower_bound import least_seconds
from steelyard.search.single.min_cut import MinCut
from steelyard.search.single.step_plans import Explored
from steelyard.search.single.variant import PLAIN, Variant
from steelyard.search.single.variant_plans import VariantPlans

NUM_POINTS = 16


def _curve(plans: VariantPlans) -> list[tuple[Variant, Point]]:
    """Return the Pareto front over all explored variants."""
    owner: dict[int, tuple[Variant, Point]] = {}
    archive = ParetoFront()
    for variant, explored in sorted(plans.known.items() or [(PLAIN, plans.explored())]):
        for point in explored.chain:
            if archive.add(point):
                owner[id(point)] = variant, point
    return [owner[id(point)] for point in archive]


def marginal_saving(plans: VariantPlans, point: Point, budget: Budget) -> NextCent | None:
    """Return the largest saving of seconds per byte above the memory limit."""
    limit = budget.memory_bytes
    if limit is None:
        return None
    candidates = [
        NextCent(more_bytes=p.peak_bytes - limit, saved_seconds=point.seconds - p.seconds)
        for _, p in _curve(plans)
        if p.peak_bytes > limit and p.seconds < point.seconds
    ]
    return max(
        candidates, key=lambda c: (c.saved_seconds / c.more_bytes, c.more_bytes), default=None
    )


def frontier(plans: VariantPlans, *, points: int) -> tuple[FrontierPoint, ...]:
    """Return the memory-time curve over all explored plans; more memory is never slower."""
    curve = _curve(plans)
    low, high = curve[0][1].peak_bytes, curve[-1][1].peak_bytes
    chosen: dict[int, tuple[Variant, Point]] = {}
    for step in range(points):
        limit = low + (high - low) * step // (points - 1)
        fitting = [at for at, (_, point) in enumerate(curve) if point.peak_bytes <= limit]
        chosen[fitting[-1]] = curve[fitting[-1]]
    return tuple(_frontier_point(plans, variant, point) for variant, point in chosen.values())


def _frontier_point(plans: VariantPlans, variant: Variant, point: Point) -> FrontierPoint:
    explored = plans.known[variant]
    return FrontierPoint(
        memory_bytes=point.peak_bytes,
        step_seconds=point.seconds,
        accuracy_loss=UNKNOWN if explored.quantized(point) else EXACT,
        flops=explored.estimator.flops_of(point.choices),
        micro_batches=variant.parts,
        rules=plans.rules(variant, point),
    )


def gap(
    explored: Explored, point: Point, budget: Budget, *, has_offloaded_states: bool
) -> Gap | None:
    """Return the gap to the lower bound; None if memory is not bounded.

    With offloaded parameters or gradients, the bound is the time of the plain step, because the
    estimator does not model memory without them.
    """
    estimator = explored.estimator
    is_often = bool(estimator.times_of(point.choices))
    if budget.memory_bytes is None or not (estimator.unit_of or estimator.eviction_choices()):
        return None
    least = min(estimator.plain_seconds, point.seconds)
    # No plan is faster than the step without recompute and offload, except through faster sliced
    # products.
    is_plain = not point.choices and not estimator.slicing_gain_seconds
    if not has_offloaded_states and not is_plain:
        least = least_seconds(
            estimator,
            MinCut(estimator),
            limit_bytes=budget.memory_bytes,
            within_seconds=point.seconds,
            repeats=is_often,
        )
    return Gap(
        step_seconds=point.seconds,
        least_seconds=least,
        is_often=is_often,
        has_offload_memory=bool(estimator.offloadable),
        has_codes=bool(estimator.quantizable),
    )
