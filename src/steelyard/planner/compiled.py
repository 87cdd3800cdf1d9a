"""Plans for Inductor: found on the captured graph, priced as the program Inductor makes of it.

Fusion lowers the peak by an amount that only lowering tells, so the search is asked for more or
less memory until what comes out fits. Each try costs a lowering, and its kernels are compiled to be
timed. Not for the search itself.
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

_TRIES, _ASKS = 5, 10
# Convolutions lay their arguments out anew under Inductor, in buffers that lowering does not show:
# up to 3.7 % of the peak (benchmarks/truth.py). Without any, predictions hold to the byte.
_MARGIN = 0.05
# What a plan may leave unused before another try is made to use it.
_UNUSED_SHARE = 0.04
# Of the curve, and of ways to lie on ranks; each is a lowering.
_POINTS, _RIVALS = 6, 4


def find_lowered(session: PlanningSession, budget: Budget) -> tuple[SearchResult, Prediction]:
    if budget.memory_bytes is not None:
        return _find_within(session, budget)
    if session.request.cluster.num_devices == 1:
        return session.search.find(budget), session.unplanned
    return _find_fastest(session, budget)


def _find_fastest(session: PlanningSession, budget: Budget) -> tuple[SearchResult, Prediction]:
    found = session.layouts.find(budget)
    rivals = islice(session.layouts.rivals(found, budget), _RIVALS)
    priced = [(each, session.priced(each.program)) for each in (found, *rivals)]
    return min(priced, key=lambda pair: pair[1].metrics.step_seconds.value)


def _find_within(session: PlanningSession, budget: Budget) -> tuple[SearchResult, Prediction]:
    assert budget.memory_bytes is not None
    limit = compiled_limit(session, budget.memory_bytes)
    asked = limit + saved_bytes(session)
    fits: tuple[SearchResult, Prediction] | None = None
    too_much: int | None = None
    least: Prediction | None = None
    tried: list[tuple[Rule, ...]] = []
    asks = 0
    while len(tried) < _TRIES and asks < _ASKS:
        asks += 1
        found = _at_most(session, budget, asked)
        if found.rules in tried:
            if fits is None or too_much:
                break  # the search has nothing else to say
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
            if not found.rules or limit - nbytes < _UNUSED_SHARE * limit or too_much:
                break
            asked += limit - nbytes
        else:
            too_much = asked
            is_least = not found.least_within and found.prediction.peak.nbytes == found.least.nbytes
            # On ranks another layout may hold less than the least of this one.
            if fits is not None or (is_least and session.request.cluster.num_devices == 1):
                break
            asked = min(asked, found.prediction.peak.nbytes) - (nbytes - limit)
    if fits is None:
        assert least is not None
        needed = math.ceil(least.peak.nbytes * (1 + _margin(session)))
        raise Infeasible(
            f"no plan for Inductor was found within memory <= {format_bytes(budget.memory_bytes)}: "
            f"the smallest of {len(tried)} tries takes ~{format_bytes(least.peak.nbytes)}",
            expected=f"at least ~{format_bytes(needed)}, set by "
            f"{least.peak.at} in {least.peak.path or 'the loss'}",
            remedy="allow more memory, take the runner python, or use a smaller batch"
            + _uncut(session),
            least_bytes=needed,
        )
    return fits


def _uncut(session: PlanningSession) -> str:
    why = session.source.why_not_split()
    return f" (it cannot be cut into micro-batches: {why})" if why else ""


def compiled_limit(session: PlanningSession, nbytes: int) -> int:
    """What a plan may take as it is lowered, where so many bytes may be taken."""
    return int(nbytes / (1 + _margin(session)))


def _margin(session: PlanningSession) -> float:
    return _MARGIN if any("convolution" in n.op for n in session.base.graph.nodes) else 0.0


def lowered_frontier(session: PlanningSession, search: StepSearch) -> tuple[FrontierPoint, ...]:
    """The curve of the captured graph, a few of its points, each as Inductor runs it."""
    points = [
        replace(point, memory_bytes=lowered.peak.nbytes, step_seconds=step.value)
        for point in search.frontier(points=_POINTS)
        for lowered in (session.priced(session.apply_rules(point.rules)),)
        for step in (lowered.metrics.step_seconds,)
    ]
    # What fusion does to a point may leave it behind another.
    points.sort(key=lambda point: (point.memory_bytes, point.step_seconds))
    best: list[FrontierPoint] = []
    for point in points:
        if not best or point.step_seconds < best[-1].step_seconds:
            best.append(point)
    return tuple(best)


def saved_bytes(session: PlanningSession) -> int:
    """How much less than what was captured a step holds that is fused, nothing being done to it."""
    if session.request.cluster.num_devices == 1:
        return session.search.explored().plain.peak_bytes - session.unplanned.peak.nbytes
    found = session.layouts.find(Budget())
    return found.prediction.peak.nbytes - session.priced(found.program).peak.nbytes


def _at_most(session: PlanningSession, budget: Budget, nbytes: int) -> SearchResult:
    """The search at this memory, or at the least it can do."""
    find = session.layouts.find if session.request.cluster.num_devices > 1 else session.search.find
    try:
        return find(replace(budget, memory_bytes=max(nbytes, 1)))
    except Infeasible as refusal:
        if refusal.least_bytes is None:
            raise
        return find(replace(budget, memory_bytes=refusal.least_bytes))
