"""Decides whether ranks send their gradients compressed, and with which codec.

A codec is used if the step becomes sufficiently faster and the loss drift of a probe stays within
the accuracy budget; otherwise the plan lists the reason with its figures. Not for finding the
fastest step with a given codec: see search/ranks/gradient_compression.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from steelyard import _torch
from steelyard.errors import Infeasible, Mismatch
from steelyard.ir.gradient_codec import BLOCK, RESIDUAL, Codec
from steelyard.ir.parallel_layout import DATA
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.operators.gradient_codecs import (
    decode_gradients,
    decode_sum,
    encode_gradients,
    encode_sum,
)
from steelyard.planner.compiled import compiled_limit, fusion_saved_bytes
from steelyard.planner.lossy import NOT_PROBED, LossyPlanner
from steelyard.planner.session import PlanningSession
from steelyard.plans.accuracy import Drift, beyond
from steelyard.plans.budget import Budget
from steelyard.plans.codec_fallbacks import codec_fallbacks
from steelyard.plans.plan import Prediction
from steelyard.plans.trade import Rejection, Remaining, codec_trades, codecs_of
from steelyard.predict import peak_bytes
from steelyard.search.ranks.gradient_compression import CompressedCandidate, Weighing
from steelyard.search.result import SearchResult
from steelyard.trades import TRADES
from steelyard.units import format_bytes, format_seconds

# A smaller gain does not justify any loss of accuracy, nor does a gain within twice the uncertainty
# of the link measurement.
_MIN_GAIN, _MIN_GAIN_IN_DOUBTS = 0.05, 2


def with_compression(
    lossy: LossyPlanner, budget: Budget, exact: SearchResult, predicted: Prediction
) -> tuple[SearchResult, Prediction]:
    """Return the fastest plan with compressed gradients, or the exact plan with the reasons.

    ``predicted`` is the prediction of the exact plan as its runner executes it. Codecs are compared
    with it, because the search prices the captured graph.
    """
    session = lossy.session
    if not budget.accuracy_loss:
        rejections = _refuse_without_budget(session, exact, predicted)
        refusals = (*exact.refused, *rejections)
        offers = exact.num_offers + sum(refusal.left is Remaining.WHOLE for refusal in rejections)
        return replace(exact, refused=refusals, num_offers=offers), predicted
    found, plain, refused = exact, predicted, list[Rejection]()
    weighed = 0
    weighing = _weighing(session, refused)
    why_not = partial(_why_not, lossy, exact, plain)

    def may_pay(candidate: CompressedCandidate) -> bool:
        return not why_not(candidate.seconds - weighing.coding_seconds(candidate), best=plain)

    for candidate in _candidates(weighing, session, refused, may_pay):
        weighed += 1
        reason = why_not(candidate.seconds, best=predicted)
        if not reason:
            try:
                tried = _try_candidate(weighing, lossy, budget, candidate, plain, best=predicted)
            except Mismatch as mismatch:
                # Ranks with unequal batch shares would issue their collectives in different orders,
                # at least after a fallback to a less lossy codec.
                tried = mismatch.happened
            if not isinstance(tried, str):
                found, predicted = tried
                continue
            reason = tried
        refused.append(Rejection(trade=candidate.trade, label=candidate.codec.label, reason=reason))
    if found is exact:
        result = replace(exact, refused=(*exact.refused, *refused))
        return replace(result, num_offers=result.num_offers + weighed), predicted
    others = sum(refusal.left is Remaining.WHOLE for refusal in refused)
    result = replace(found, refused=(*found.refused, *refused))
    return replace(result, num_offers=result.num_offers + others), predicted


def _refuse_without_budget(
    session: PlanningSession, exact: SearchResult, predicted: Prediction
) -> list[Rejection]:
    """Return a rejection of each codec for an accuracy budget of 0, without trying any codec.

    A codec only saves time that is spent waiting for other ranks. If all ranks already share the
    batch, it can save this waiting time at most.
    """
    refused: list[Rejection] = []
    reason = "is lossy and the accuracy budget is 0"
    layout, waiting_seconds = (
        exact.program.layout,
        predicted.metrics.exposed_communication_seconds.value,
    )
    is_shared_by_all = layout.data == session.request.cluster.num_devices
    if is_shared_by_all and waiting_seconds:
        reason += (
            f"; it could save at most the ~{format_seconds(waiting_seconds)} that ranks wait for "
            "each other"
        )
    available = _codecs_with_trades(session, refused)
    refused += (Rejection(trade=available[c], label=c.label, reason=reason) for c in available)
    return refused


def _why_not(
    lossy: LossyPlanner,
    exact: SearchResult,
    plain: Prediction,
    seconds: float,
    *,
    best: Prediction,
) -> str | None:
    """Return the reason why a candidate that takes ``seconds`` is not tried; None if it is."""
    session, gain = lossy.session, _step_seconds_of(exact.prediction) / seconds - 1
    # A compiled step computes for less time, so communication is a larger share of it.
    is_compiled = session.request.runner == "inductor"
    is_judged_later = is_compiled and gain > 0
    if not is_judged_later and (reason_small := _why_gain_too_small(session, gain, plain)):
        return reason_small
    if is_judged_later and best is not plain:
        # Each further candidate costs a lowering and the compilation of its kernels.
        return "is slower than the chosen plan, by the costs of the captured graph"
    if reason := lossy.why_not_probed():
        return reason
    if not is_compiled and seconds >= _step_seconds_of(best):
        return f"alone takes ~{format_seconds(seconds)} a step; the chosen plan takes less"
    return None


def _step_seconds_of(predicted: Prediction) -> float:
    return predicted.metrics.step_seconds.value


def refuse_unprobed() -> tuple[Rejection, ...]:
    """Return the rejections of all codecs on a declared cluster, where no loss drift can be
    probed."""
    reason = f"is lossy, and {NOT_PROBED}"
    label = "compressed gradients"
    return tuple(
        Rejection(trade=trade, label=label, reason=reason, left=Remaining.NEVER)
        for trade in (trade.name for trade in codec_trades(TRADES))
    )


def note_on_accuracy(budget: Budget) -> tuple[str, ...]:
    """Return a note that the accuracy budget is unused because the cluster is only declared."""
    if not budget.accuracy_loss:
        return ()
    return (f"the plan loses no accuracy, although the budget allows it: {NOT_PROBED}",)


def available_codecs(session: PlanningSession) -> list[Codec]:
    """Return the codecs that the request allows and this machine can compile."""
    is_compiling = _torch.cpp_compiler() is not None
    codecs = codecs_of(session.request.trades)
    return [codec for codec in codecs if is_compiling or not codec.is_compiled]


def compile_codecs(codecs: Sequence[Codec], *, num_ranks: int) -> None:
    """Compile the operators of these codecs ahead of the steps that use them."""
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


def _codecs_with_trades(session: PlanningSession, refused: list[Rejection]) -> dict[Codec, str]:
    """Return the available codecs with their trades, and append a rejection for every other
    codec.
    """
    codecs = available_codecs(session)
    available: dict[Codec, str] = {}
    reason = "Inductor finds no C++ compiler to compile the codecs"
    for codec, trade in codecs_of(session.request.trades).items():
        if codec in codecs:
            available[codec] = trade.name
        else:
            refusal = Rejection(
                trade=trade.name, label=codec.label, reason=reason, left=Remaining.NEVER
            )
            refused.append(refusal)
    return available


def _weighing(session: PlanningSession, refused: list[Rejection]) -> Weighing:
    return Weighing(layouts=session.layouts, codecs=[*_codecs_with_trades(session, refused)])


def _candidates(
    weighing: Weighing,
    session: PlanningSession,
    refused: list[Rejection],
    may_pay: Callable[[CompressedCandidate], bool],
) -> list[CompressedCandidate]:
    """Return the candidates, fastest first; append rejections of impossible ones to ``refused``.

    Each candidate that may pay off is replaced by its least lossy variant.
    """
    if not weighing.codecs:
        return []
    session.request.on_progress("comparing gradient codecs")
    found, impossible = weighing.fastest(thoroughly=True)
    found = [
        weighing.gentler(candidate) if may_pay(candidate) else candidate for candidate in found
    ]
    refused += (replace(refusal, left=Remaining.NEVER) for refusal in impossible)
    return sorted(found, key=lambda candidate: candidate.seconds)


def _why_gain_too_small(session: PlanningSession, gain: float, plain: Prediction) -> str | None:
    """Return why a relative ``gain`` over the exact plan is too small, or None if it is enough."""
    step, waiting_seconds = (
        _step_seconds_of(plain),
        plain.metrics.exposed_communication_seconds.value,
    )
    if gain <= 0:
        waiting = f"waits ~{format_seconds(waiting_seconds)} for other ranks"
        bound = "is bound by computation" if waiting_seconds < step / 2 else waiting
        slowdown = 1 / (1 + gain) - 1
        return (
            f"would cost {slowdown:.0%}: the plan takes ~{format_seconds(step)} a step and {bound}"
        )
    doubt = session.prices.costs.links[DATA].doubt if waiting_seconds else 0.0
    min_gain = max(_MIN_GAIN, _MIN_GAIN_IN_DOUBTS * doubt * waiting_seconds / step)
    if gain > min_gain:
        return None
    return f"would save {gain:.0%}, and less than {min_gain:.0%} is within the prediction error"


def _try_candidate(
    weighing: Weighing,
    lossy: LossyPlanner,
    budget: Budget,
    candidate: CompressedCandidate,
    plain: Prediction,
    *,
    best: Prediction,
) -> tuple[SearchResult, Prediction] | str:
    """Return the candidate's plan within the whole budget, as executed and probed, or the
    rejection.
    """
    session, limit, search_budget = lossy.session, budget.memory_bytes, budget
    is_compiled = session.request.runner == "inductor"
    if limit is None:
        # Without a memory bound no other trade is added, and a probe takes less time than a search.
        drift = _drift_within(
            lossy, budget, candidate.rules, session.layouts.candidates.apply_rules(candidate.rules)
        )
        if isinstance(drift, str):
            return drift
    if is_compiled and limit is not None:
        limit = compiled_limit(session, limit)
        search_budget = replace(budget, memory_bytes=limit + fusion_saved_bytes(session))
    try:
        found = weighing.plan(candidate, search_budget)
    except Infeasible:
        return "no plan that uses it fits the budget"
    predicted = session.priced(found.program) if is_compiled else found.prediction
    seconds = _step_seconds_of(predicted)
    if seconds >= _step_seconds_of(best):
        return (
            "together with the other trades that the budget requires, it would take "
            f"~{format_seconds(seconds)} a step"
        )
    too_little = _why_gain_too_small(session, _step_seconds_of(plain) / seconds - 1, plain)
    if too_little:
        return too_little
    if limit is not None and predicted.peak.nbytes > limit:
        return f"with it, the compiled step would take {format_bytes(predicted.peak.nbytes)}"
    if (
        limit is not None
        and (fallback_peak := peak_in_less_lossy_codecs(session, found.rules, found.program))
        > limit
    ):
        return (
            "with it, steps in less lossy codecs or uncompressed would take "
            f"{format_bytes(fallback_peak)}"
        )
    drift = _drift_within(lossy, budget, found.rules, found.program)
    if isinstance(drift, str):
        return drift
    return found, replace(predicted, metrics=replace(predicted.metrics, accuracy_loss=str(drift)))


def _drift_within(
    lossy: LossyPlanner, budget: Budget, rules: Sequence[Rule], program: Program
) -> Drift | str:
    """Return the probed drift of this plan, or the reason if the accuracy budget does not allow
    it.
    """
    drift = lossy.probe_drift(rules, program, budget.accuracy_loss)
    if isinstance(drift, str):
        return f"is lossy, and {drift}"
    return drift if drift.keeps(budget.accuracy_loss) else beyond(drift, budget.accuracy_loss)


def peak_in_less_lossy_codecs(
    session: PlanningSession, rules: Sequence[Rule], program: Program
) -> int:
    """Return the highest peak of the step with any of its less lossy fallback codecs, in bytes.

    The uncompressed fallback still has the error-feedback residuals in memory, as the warm-up steps
    do. Training may fall back to any of these codecs and stay with it.
    """
    inputs = program.graph.inputs()
    residual_bytes = sum(n.outputs[0].nbytes for n in inputs if n.name.startswith(RESIDUAL))
    *lossy, exact = codec_fallbacks(rules)
    return max(
        [
            _peak_bytes(session, exact) + residual_bytes,
            *(_peak_bytes(session, c) for c in lossy[1:]),
        ]
    )


def _peak_bytes(session: PlanningSession, rules: Sequence[Rule]) -> int:
    program = session.apply_rules(rules)
    if session.request.runner == "inductor":
        return session.priced(program).peak.nbytes
    return peak_bytes(program, session.prices.costs)
