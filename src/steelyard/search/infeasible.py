"""Error messages for budgets that no plan fits: the minimum, its cause, and how to lower it.

Not for finding the minimum: see search/single/explore.py.
"""

from collections.abc import Sequence

from steelyard.errors import Infeasible
from steelyard.ir.graph import Phase, Role
from steelyard.ir.rule import Rule, kind_named
from steelyard.ir.rule_kinds import MicroBatches, StateOffload
from steelyard.plans.budget import Budget
from steelyard.plans.peak_memory import PIECES, PeakMemory
from steelyard.plans.plan import Prediction
from steelyard.plans.trade import Rejection
from steelyard.units import format_bytes, format_seconds


def beyond_budget(
    peak: PeakMemory,
    budget: Budget,
    *,
    parts: int,
    refusals: Sequence[Rejection],
    has_offload_memory: bool,
    leaner_settings: Sequence[str] = (),
) -> Infeasible:
    """Return the error for a memory budget that no plan fits.

    ``peak`` is the peak of the plan with the least memory, found with ``parts`` micro-batches.
    ``leaner_settings`` are optimizer settings that lower the memory of its step.
    """
    assert budget.memory_bytes is not None
    in_parts = f" with {parts} micro-batches" if parts > 1 else ""
    return Infeasible(
        f"no plan fits memory <= {format_bytes(budget.memory_bytes)}: this step needs at least "
        f"~{format_bytes(peak.nbytes)}{in_parts}",
        expected=f"at least ~{format_bytes(peak.nbytes)}, set by {_describe_peak(peak)}",
        remedy=_remedy(
            peak,
            budget.memory_bytes,
            parts=parts,
            refusals=refusals,
            has_offload_memory=has_offload_memory,
            leaner_settings=leaner_settings,
        ),
        least_bytes=peak.nbytes,
    )


def _describe_peak(peak: PeakMemory) -> str:
    if not peak.at:
        return "memory that is resident for the whole step"
    text = f"{peak.at} in {peak.path or 'the loss'}"
    text += f" ({peak.line})" if peak.line else ""
    return (
        f"{text}, {peak.phase.value} pass, of which ~{format_bytes(peak.resident_bytes)} are "
        "resident"
    )


def _remedy(
    peak: PeakMemory,
    limit_bytes: int,
    *,
    parts: int,
    refusals: Sequence[Rejection],
    has_offload_memory: bool,
    leaner_settings: Sequence[str],
) -> str:
    """Return the first remedy that could help: optimizer, model, batch or offload memory."""
    piece_bytes = sum(holding.nbytes for holding in peak.alive if holding.what == PIECES)
    has_state = any(holding.role is Role.STATE for holding in peak.alive)
    state_hint = (
        ", or give offload memory for its state (--offload-dir)"
        if has_state and not has_offload_memory
        else ""
    )
    if peak.resident_bytes >= limit_bytes:
        state_refusal = _refusal_of(StateOffload, refusals)
        if has_state and has_offload_memory and state_refusal is not None:
            state_hint = f"; the optimizer state cannot be offloaded: {state_refusal.reason}"
        what = "parameters, buffers, batch and optimizer state"
        if piece_bytes:
            what = f"{what}, with {format_bytes(piece_bytes)} of {PIECES},"
        return (
            f"{what} alone take ~{format_bytes(peak.resident_bytes)}: use a smaller model, or an "
            f"optimizer with less state{state_hint}"
        )
    if peak.phase is Phase.UPDATE and piece_bytes:
        # An optimizer step over all parameters at once cannot be offloaded, so it has no separate
        # pieces.
        return (
            "the update of one parameter sets the peak: use smaller parameters, or an optimizer "
            "with fewer temporaries"
        )
    if peak.phase is Phase.UPDATE:
        settings = "".join(f"{setting}, or " for setting in leaner_settings)
        return (
            f"the optimizer's step sets the peak: use {settings}an optimizer with fewer temporaries"
            f"{state_hint}"
        )
    offload_hint = "" if has_offload_memory else ", or give offload memory (--offload-dir)"
    refusal = _refusal_of(MicroBatches, refusals)
    if refusal is not None:
        reason = f"it cannot be split into micro-batches: {refusal.reason}"
        return f"use a smaller batch ({reason}){offload_hint}"
    if parts > 1:
        return (
            "use a smaller model or shorter sequences (more micro-batches do not "
            f"help){offload_hint}"
        )
    return f"use a smaller batch, a smaller model or more memory{offload_hint}"


def _refusal_of(kind: type[Rule], refusals: Sequence[Rejection]) -> Rejection | None:
    return next((r for r in refusals if issubclass(kind_named(r.trade), kind)), None)


def too_slow(prediction: Prediction, budget: Budget) -> Infeasible | None:
    """Return the error if the fastest plan within the memory exceeds a time bound, or None."""
    metrics, is_bounded = prediction.metrics, budget.memory_bytes is not None
    for name, bound, seconds in (
        ("step time", budget.step_seconds, metrics.step_seconds.value),
        ("computation", budget.computation_seconds, metrics.computation_seconds.value),
        ("communication", budget.communication_seconds, metrics.communication_seconds.value),
    ):
        if bound is not None and seconds > bound:
            return Infeasible(
                f"no plan{' within the memory' if is_bounded else ''} fits {name} <= "
                f"{format_seconds(bound)}: the fastest takes ~{format_seconds(seconds)}",
                expected=f"at least ~{format_seconds(seconds)}",
                remedy="allow more memory or time, or use a smaller batch"
                if is_bounded
                else "allow more time, or use a smaller batch or model",
            )
    return None
