"""Whether ranks send their gradients in codes: where that is faster by enough, and the loss of a
probe drifts no further than the budget allows; and if not, the reason with its figures.

Not for how a step is fastest with a code: see search/ranks/gradient_compression.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from steelyard import _torch
from steelyard.errors import Infeasible, Mismatch
from steelyard.ir.gradient_codec import BLOCK, CODE_TRADES, CODES, RESIDUAL, Codec, codec_fallbacks
from steelyard.ir.parallel_layout import DATA
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.operators.gradient_codecs import (
    decode_gradients,
    decode_sum,
    encode_gradients,
    encode_sum,
)
from steelyard.planner.compiled import compiled_limit, saved_bytes
from steelyard.planner.lossy import NOT_PROBED, LossyPlanner
from steelyard.planner.session import PlanningSession
from steelyard.plans.accuracy import Drift, beyond
from steelyard.plans.budget import Budget
from steelyard.plans.plan import Prediction
from steelyard.plans.trade import Rejection, Remaining
from steelyard.predict import peak_bytes
from steelyard.search.ranks.gradient_compression import CompressedCandidate, Weighing
from steelyard.search.result import SearchResult
from steelyard.units import format_bytes, format_seconds

# A gain of less is not worth any accuracy; nor is one that the doubt of the link may have made.
_LEAST_GAIN, _DOUBTS = 0.05, 2


def with_compression(
    lossy: LossyPlanner, budget: Budget, exact: SearchResult, predicted: Prediction
) -> tuple[SearchResult, Prediction]:
    """The fastest plan whose gradients go in codes, or the exact one, which then says why not.
    ``predicted`` is what the runner makes of the exact one, by which codes are judged: the search
    prices what was captured."""
    session = lossy.session
    if not budget.accuracy_loss:
        barred = _not_allowed(session, exact, predicted)
        refusals = (*exact.refused, *barred)
        offers = exact.num_offers + sum(refusal.left is Remaining.WHOLE for refusal in barred)
        return replace(exact, refused=refusals, num_offers=offers), predicted
    found, plain, refused = exact, predicted, list[Rejection]()
    weighed = 0
    weighing = _weighing(session, refused)
    why_not = partial(_why_not, lossy, exact, plain)

    def may_pay(way: CompressedCandidate) -> bool:
        return not why_not(way.seconds - weighing.coding_seconds(way), best=plain)

    for way in _ways(weighing, session, refused, may_pay):
        weighed += 1
        reason = why_not(way.seconds, best=predicted)
        if not reason:
            try:
                tried = _tried(weighing, lossy, budget, way, plain, best=predicted)
            except Mismatch as odd:
                # Ranks of unequal shares would exchange in different orders, if in milder codes.
                tried = odd.happened
            if not isinstance(tried, str):
                found, predicted = tried
                continue
            reason = tried
        refused.append(Rejection(trade=way.trade, label=way.codec.label, reason=reason))
    if found is exact:
        told = replace(exact, refused=(*exact.refused, *refused))
        return replace(told, num_offers=told.num_offers + weighed), predicted
    others = sum(refusal.left is Remaining.WHOLE for refusal in refused)
    told = replace(found, refused=(*found.refused, *refused))
    return replace(told, num_offers=told.num_offers + others), predicted


def _not_allowed(
    session: PlanningSession, exact: SearchResult, predicted: Prediction
) -> list[Rejection]:
    """A refusal of each code where no accuracy may be lost, with no figure that takes weighing.

    Codes spare nothing but waiting for other ranks, so where all ranks share the batch already that
    bounds what they could save.
    """
    refused: list[Rejection] = []
    reason = "is lossy and the accuracy budget is 0"
    layout, waits = exact.program.layout, predicted.metrics.exposed_communication_seconds.value
    is_shared_by_all = layout.batch == session.request.cluster.num_devices
    if is_shared_by_all and waits:
        reason += f"; it could save at most the ~{format_seconds(waits)} that ranks wait"
    able = _codecs(session, refused)
    refused += (Rejection(trade=able[c], label=c.label, reason=reason) for c in able)
    return refused


def _why_not(
    lossy: LossyPlanner,
    exact: SearchResult,
    plain: Prediction,
    seconds: float,
    *,
    best: Prediction,
) -> str | None:
    """Why a way that takes so long, nothing else being done, is not tried."""
    session, gain = lossy.session, _seconds(exact.prediction) / seconds - 1
    # A compiled step computes for less time, of which what is sent is a larger share.
    is_compiled = session.request.runner == "inductor"
    is_judged_later = is_compiled and gain > 0
    if not is_judged_later and (too_little := _too_little(session, gain, plain)):
        return too_little
    if is_judged_later and best is not plain:
        # Each is a lowering, and kernels to compile.
        return "was slower than what is taken, at the prices of what was captured"
    if barred := lossy.why_not_probed():
        return barred
    if not is_compiled and seconds >= _seconds(best):
        return f"takes ~{format_seconds(seconds)} a step before anything else, what is taken less"
    return None


def _seconds(predicted: Prediction) -> float:
    return predicted.metrics.step_seconds.value


def refuse_unprobed() -> tuple[Rejection, ...]:
    """Of devices that are not here: what few bits would do to the loss there, nobody can tell."""
    reason = f"is lossy, and {NOT_PROBED}"
    label = "gradients in codes"
    return tuple(
        Rejection(trade=trade, label=label, reason=reason, left=Remaining.NEVER)
        for trade in CODE_TRADES
    )


def note_on_accuracy(budget: Budget) -> tuple[str, ...]:
    """Where it may be lost, on devices that are not here."""
    if not budget.accuracy_loss:
        return ()
    return (f"no accuracy is lost, though the budget allows it: {NOT_PROBED}",)


def available_codecs(session: PlanningSession) -> list[Codec]:
    """The codes that can be had."""
    trades = {trade.name for trade in session.request.trades}
    is_compiling = _torch.cpp_compiler() is not None
    return [
        codec
        for (trade, _, _), codec in CODES.items()
        if trade in trades and (is_compiling or not codec.is_compiled)
    ]


def compile_codecs(codecs: Sequence[Codec], *, num_ranks: int) -> None:
    """Has the calls compiled that these codes are made of, for steps to come."""
    x = torch.zeros(num_ranks * BLOCK)
    for codec in codecs:
        if not codec.is_compiled:
            continue
        for parts in {1, num_ranks}:
            residual = torch.zeros(num_ranks * BLOCK) if codec.has_residual else None
            coded = encode_gradients([x], residual, codec.name, parts)
            decode_gradients(coded, codec.name)
            if parts == 1:
                decode_sum(torch.cat([coded] * num_ranks), codec.name)
            else:
                own = torch.zeros(BLOCK) if codec.has_residual else None
                encode_sum(coded, own, codec.name)


def _codecs(session: PlanningSession, refused: list[Rejection]) -> dict[Codec, str]:
    """The codes that can be had here, with their trades; the others are refused."""
    codecs, trades = available_codecs(session), {trade.name for trade in session.request.trades}
    able: dict[Codec, str] = {}
    reason = "Inductor finds no C++ compiler to make codes with"
    for (trade, _, _), codec in CODES.items():
        if codec in codecs:
            able[codec] = trade
        elif trade in trades:
            refusal = Rejection(trade=trade, label=codec.label, reason=reason, left=Remaining.NEVER)
            refused.append(refusal)
    return able


def _weighing(session: PlanningSession, refused: list[Rejection]) -> Weighing:
    return Weighing(layouts=session.layouts, codecs=[*_codecs(session, refused)])


def _ways(
    weighing: Weighing,
    session: PlanningSession,
    refused: list[Rejection],
    may_pay: Callable[[CompressedCandidate], bool],
) -> list[CompressedCandidate]:
    """The fastest first, and made gentler where they may pay; what cannot be is told."""
    if not weighing.codecs:
        return []
    session.request.on_progress("weighing gradients in codes")
    found, cannot = weighing.fastest(thoroughly=True)
    found = [weighing.gentler(way) if may_pay(way) else way for way in found]
    refused += (replace(refusal, left=Remaining.NEVER) for refusal in cannot)
    return sorted(found, key=lambda way: way.seconds)


def _too_little(session: PlanningSession, gain: float, plain: Prediction) -> str | None:
    """Why this is not faster by enough than the exact plan; None where it is."""
    step, waits = _seconds(plain), plain.metrics.exposed_communication_seconds.value
    if gain <= 0:
        waited = f"waits ~{format_seconds(waits)} for other ranks"
        bound = "is bound by computation" if waits < step / 2 else waited
        more = 1 / (1 + gain) - 1
        return f"would cost {more:.0%}: the plan takes ~{format_seconds(step)} a step and {bound}"
    doubt = session.prices.costs.links[DATA].doubt if waits else 0.0
    least = max(_LEAST_GAIN, _DOUBTS * doubt * waits / step)
    if gain > least:
        return None
    return f"would gain {gain:.0%}, and less than {least:.0%} may be an error of what is predicted"


def _tried(
    weighing: Weighing,
    lossy: LossyPlanner,
    budget: Budget,
    way: CompressedCandidate,
    plain: Prediction,
    *,
    best: Prediction,
) -> tuple[SearchResult, Prediction] | str:
    """The plan with all that the budget needs besides, as it runs, and probed; or why it is not
    taken."""
    session, limit, asked = lossy.session, budget.memory_bytes, budget
    is_compiled = session.request.runner == "inductor"
    if limit is None:
        # Nothing else is traded then, and a probe takes less time than a search.
        seen = _drift_within(lossy, budget, way.rules, session.layouts.ways.apply_rules(way.rules))
        if isinstance(seen, str):
            return seen
    if is_compiled and limit is not None:
        limit = compiled_limit(session, limit)
        asked = replace(budget, memory_bytes=limit + saved_bytes(session))
    try:
        found = weighing.plan(way, asked)
    except Infeasible:
        return "with it no plan fits the budget"
    predicted = session.priced(found.program) if is_compiled else found.prediction
    seconds = _seconds(predicted)
    if seconds >= _seconds(best):
        return f"with what the budget needs besides it would take ~{format_seconds(seconds)} a step"
    too_little = _too_little(session, _seconds(plain) / seconds - 1, plain)
    if too_little:
        return too_little
    if limit is not None and predicted.peak.nbytes > limit:
        return f"with it the step would take {format_bytes(predicted.peak.nbytes)} when compiled"
    if (
        limit is not None
        and (most := peak_in_less_lossy_codecs(session, found.rules, found.program)) > limit
    ):
        return f"with it steps in milder codes or none would take {format_bytes(most)}"
    seen = _drift_within(lossy, budget, found.rules, found.program)
    if isinstance(seen, str):
        return seen
    return found, replace(predicted, metrics=replace(predicted.metrics, accuracy_loss=str(seen)))


def _drift_within(
    lossy: LossyPlanner, budget: Budget, rules: Sequence[Rule], program: Program
) -> Drift | str:
    """Of this plan, as far as can be seen; or why the budget does not allow it."""
    seen = lossy.drift_of(rules, program, budget.accuracy_loss)
    if isinstance(seen, str):
        return f"is lossy, and {seen}"
    return seen if seen.keeps(budget.accuracy_loss) else beyond(seen, budget.accuracy_loss)


def peak_in_less_lossy_codecs(
    session: PlanningSession, rules: Sequence[Rule], program: Program
) -> int:
    """What a step takes in codes that lose less, or, as the first steps, in none beside the room
    for what codes hold back: training may come to go on so."""
    inputs = program.graph.inputs()
    held = sum(n.outputs[0].nbytes for n in inputs if n.name.startswith(RESIDUAL))
    *coded, exact = codec_fallbacks(rules)
    return max([_peak_bytes(session, exact) + held, *(_peak_bytes(session, c) for c in coded[1:])])


def _peak_bytes(session: PlanningSession, rules: Sequence[Rule]) -> int:
    program = session.apply_rules(rules)
    if session.request.runner == "inductor":
        return session.priced(program).peak.nbytes
    return peak_bytes(program, session.prices.costs)
