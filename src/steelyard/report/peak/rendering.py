"""Renders the answer of ``steelyard why``, as text and as JSON.

Not for the answer: see causes.py.
"""

from typing import Any

from steelyard.plans.peak_memory import PeakMemory
from steelyard.report.peak.causes import PeakCause, PeakCauses
from steelyard.report.peak_groups import short_op
from steelyard.report.styled_text import Line, Tone, headed, shown, words
from steelyard.units import format_bytes

_MOST_ROWS = 12


def cause_lines(found: PeakCauses, *, width: int) -> list[Line]:
    """Render the peaks, and below them each group of tensors with its reasons."""
    lines = [*words(found.title, width=width, tone=Tone.STRONG), *_verdict(found, width)]
    lines += shown(headed("before   ", f"without trades, {_peak(found.before)}", width))
    extra = found.eager_bytes - found.before.nbytes
    if extra > 0:
        text = (
            f"plain PyTorch keeps ~{format_bytes(extra)} more, which cannot be named: autograd "
            "saves and frees values in another order than the captured graph"
        )
        lines += shown(headed("         ", text, width))
    if found.after is not None:
        lines += shown(headed("plan     ", _peak(found.after), width))
        if found.step_trades:
            text = f"of the whole step: {', '.join(found.step_trades)}"
            lines += shown(headed("         ", text, width))
    title = "what fills the device, by module and source line"
    title += ": before, in the plan" if found.after is not None else ""
    lines += words(title, width=width, tone=Tone.STRONG)
    for row in found.rows[:_MOST_ROWS]:
        lines += _row(row, width)
    if rest := found.rows[_MOST_ROWS:]:
        nbytes = format_bytes(sum(row.before_bytes for row in rest))
        lines += shown(headed("  ", f"and {len(rest)} more lines, ~{nbytes} before", width))
    return lines


def to_json(found: PeakCauses) -> dict[str, Any]:
    return {
        "schema": "steelyard.why/1",
        "title": found.title,
        "budget_bytes": found.budget_bytes,
        "eager_bytes": found.eager_bytes,
        "fits_untouched": found.fits_untouched,
        "no_plan": found.refusal,
        "before": _peak_json(found.before),
        "plan": None if found.after is None else _peak_json(found.after),
        "step_trades": list(found.step_trades),
        "tensors": [
            {
                "where": row.where,
                "line": row.line,
                "count": row.count,
                "what": list(row.what),
                "before_bytes": row.before_bytes,
                "plan_bytes": row.after_bytes,
                "why": list(row.why),
                "trades": list(row.trades),
            }
            for row in found.rows
        ],
    }


def _verdict(found: PeakCauses, width: int) -> tuple[Line, ...]:
    text = f"plain PyTorch needs ~{format_bytes(found.eager_bytes)}"
    tone = Tone.PLAIN
    if found.budget_bytes is not None:
        over = found.eager_bytes - found.budget_bytes
        text += f" of {format_bytes(found.budget_bytes)}"
        text += f": it runs out of memory, ~{format_bytes(over)} over" if over > 0 else ": it fits"
        tone = Tone.BAD if over > 0 else Tone.GOOD
    lines = words(text, width=width, tone=tone)
    if found.refusal:
        lines += words(found.refusal, width=width, tone=Tone.BAD)
    return lines


def _peak(peak: PeakMemory) -> str:
    place = ", ".join(part for part in (peak.path, peak.line) if part)
    at = short_op(peak.at) if peak.at else "the optimizer's step"
    return f"~{format_bytes(peak.nbytes)} in the {peak.phase.value} pass, at {at}" + (
        f" ({place})" if place else ""
    )


def _row(row: PeakCause, width: int) -> tuple[Line, ...]:
    times = f" x{row.count}" if row.count > 1 else ""
    amounts = f"~{format_bytes(row.before_bytes)}"
    if row.after_bytes is not None:
        after = f"~{format_bytes(row.after_bytes)}" if row.after_bytes else "none"
        amounts += f" -> {after}"
    where = " ".join(part for part in (row.where, row.line) if part)
    what = "" if row.where == f"({', '.join(row.what)})" else f": {', '.join(row.what)}{times}"
    head = f"  {amounts:<22}  " if row.after_bytes is not None else f"  {amounts:<10}  "
    lines = shown(headed(head, f"{where}{what}", width))
    blank = " " * len(head)
    for reason in row.why:
        lines += shown(headed(blank, reason, width, Tone.FAINT))
    for trade in row.trades:
        lines += shown(headed(blank, f"the plan: {trade}", width, Tone.GOOD))
    return lines


def _peak_json(peak: PeakMemory) -> dict[str, Any]:
    return {
        "nbytes": peak.nbytes,
        "resident_bytes": peak.resident_bytes,
        "workspace_bytes": peak.workspace_bytes,
        "at": peak.at,
        "where": peak.path,
        "line": peak.line,
        "phase": peak.phase.value,
    }
