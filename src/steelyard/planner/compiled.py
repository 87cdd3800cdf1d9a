"""Plans for Inductor: searched on the captured graph, priced on the program that Inductor makes of
it.

Only lowering shows by how much fusion reduces the peak, so the search is repeated with a higher or
lower memory limit until the lowered program fits. Each attempt needs one lowering, and its kernels
are compiled so that they can be timed. Not for the search itself: see search/.
"""

import math
from dataclasses import replace
from itertools import islice

from steelyard.errors import Infeasible
from steelyard.ir.rule import Rule
from steelyard.planner.session import PlanningSession
from steelyard.plans.budget import Budget
from steelyard.plans.plan import FrontierPoint, Prediction
from steelyard.search import SearchResult, StepSearch
from steelyard.units import format_bytes

_MAX_LOWERINGS, _MAX_SEARCHES = 5, 10
# Inductor changes the layout of convolution arguments, in buffers that lowering does not show: up
# to 3.7 % of the peak (benchmarks/truth.py). Without convolutions, predictions are exact to the
# byte.
_MARGIN = 0.05
# If a plan leaves a larger share of the limit unused, the search is repeated with a higher limit.
_UNUSED_SHARE = 0.04
# How many frontier points, and how many alternative layouts, are lowered and compared.
_NUM_POINTS, _NUM_ALTERNATIVES = 6, 4


def find_compiled_plan(session: PlanningSession, budget: Budget) -> tuple[SearchResult, Prediction]:
    if budget.memory_bytes is not None:
        return _find_within(session, budget)
    if session.request.cluster.num_devices == 1:
        return session.search.find(budget), session.unplanned
    return _find_fastest(session, budget)


def _find_fastest(session: PlanningSession, budget: Budget) -> tuple[SearchResult, Prediction]:
    found = session.find_layout(budget)
    alternatives = islice(session.layouts.rivals(found, budget), _NUM_ALTERNATIVES)
    priced = [(each, session.priced(each.program)) for each in (found, *alternatives)]
    return min(priced, key=lambda pair: pair[1].metrics.step_seconds.value)


def _find_within(session: PlanningSession, budget: Budget) -> tuple[SearchResult, Prediction]:
    assert budget.memory_bytes is not None
    limit = compiled_limit(session, budget.memory_bytes)
    asked = limit + fusion_saved_bytes(session)
    fits: tuple[SearchResult, Prediction] | None = None
    too_large_limit: int | None = None
    least: Prediction | None = None
    tried: list[tuple[Rule, ...]] = []
    searches = 0
    while len(tried) < _MAX_LOWERINGS and searches < _MAX_SEARCHES:
        searches += 1
        found = _search_within(session, budget, asked)
        if found.rules in tried:
            if fits is None or too_large_limit:
                break  # the search returns the same plan again
            asked += limit - fits[1].peak.nbytes
            continue
        tried.append(found.rules)
        lowered = session.unplanned if not found.rules else session.priced(found.program)
        nbytes = lowered.peak.nbytes
        if least is None or nbytes < least.peak.nbytes:
            least = lowered
        if nbytes <= limit:
            if fits is None or found.prediction.peak.nbytes > fits[0].prediction.peak.nbytes:
                fits = found, lowered
            if not found.rules or limit - nbytes < _UNUSED_SHARE * limit or too_large_limit:
                break
            asked += limit - nbytes
        else:
            too_large_limit = asked
            is_least = not found.least_within and found.prediction.peak.nbytes == found.least.nbytes
            # With several ranks, another layout may need less memory than the minimum of this one.
            if fits is not None or (is_least and session.request.cluster.num_devices == 1):
                break
            asked = min(asked, found.prediction.peak.nbytes) - (nbytes - limit)
    if fits is None:
        assert least is not None
        needed = math.ceil(least.peak.nbytes * (1 + _margin(session)))
        raise Infeasible(
            f"no plan for Inductor fits within memory <= {format_bytes(budget.memory_bytes)}: the "
            f"smallest of {len(tried)} plans tried takes ~{format_bytes(least.peak.nbytes)}",
            expected=f"at least ~{format_bytes(needed)}, set by "
            f"{least.peak.at} in {least.peak.path or 'the loss'}",
            remedy="allow more memory, use the python runner, or use a smaller batch"
            + _why_not_split(session),
            least_bytes=needed,
        )
    return fits


def _why_not_split(session: PlanningSession) -> str:
    why = session.source.why_not_split()
    return f" (it cannot be split into micro-batches: {why})" if why else ""


def compiled_limit(session: PlanningSession, nbytes: int) -> int:
    """Return the memory limit for a lowered program if the budget is ``nbytes``."""
    return int(nbytes / (1 + _margin(session)))


def _margin(session: PlanningSession) -> float:
    return _MARGIN if any("convolution" in n.op for n in session.base.graph.nodes) else 0.0


def compiled_frontier(session: PlanningSession, search: StepSearch) -> tuple[FrontierPoint, ...]:
    """The memory-time curve of the captured graph: some of its points, each as Inductor runs it."""
    points = [
        replace(point, memory_bytes=lowered.peak.nbytes, step_seconds=step.value)
        for point in search.frontier(points=_NUM_POINTS)
        for lowered in (session.priced(session.apply_rules(point.rules)),)
        for step in (lowered.metrics.step_seconds,)
    ]
    # Fusion can make one point worse than another in both memory and time.
    points.sort(key=lambda point: (point.memory_bytes, point.step_seconds))
    best: list[FrontierPoint] = []
    for point in points:
        if not best or point.step_seconds < best[-1].step_seconds:
            best.append(point)
    return tuple(best)


def fusion_saved_bytes(session: PlanningSession) -> int:
    """Return by how many bytes fusion lowers the peak of the step without trades."""
    if session.request.cluster.num_devices == 1:
        return session.search.untraded_bytes - session.unplanned.peak.nbytes
    found = session.find_layout(Budget())
    return found.prediction.peak.nbytes - session.priced(found.program).peak.nbytes


def _search_within(session: PlanningSession, budget: Budget, nbytes: int) -> SearchResult:
    """Search within ``nbytes``; if that is infeasible, within the least memory that is possible."""
    find = session.find_layout if session.request.cluster.num_devices > 1 else session.search.find
    try:
        return find(replace(budget, memory_bytes=max(nbytes, 1)))
    except Infeasible as refusal:
        if refusal.least_bytes is None:
            raise
        return find(replace(budget, memory_bytes=refusal.least_bytes))
