"""Renders the answer to "will it fit", as text and as JSON.

Not for computing it: see planner/memory_fit.py.
"""

from typing import Any

from steelyard.plans.memory_fit import DOUBT, Fit, FitVerdict, Lever, MemoryNeed
from steelyard.report.styled_text import Line, Tone, headed, shown, words
from steelyard.units import format_bytes

_TONES = {
    FitVerdict.FITS: Tone.GOOD,
    FitVerdict.TIGHT: Tone.STRONG,
    FitVerdict.DOES_NOT_FIT: Tone.BAD,
}
_SAID = {
    FitVerdict.FITS: "fits",
    FitVerdict.TIGHT: "may not fit, the difference is smaller than the error of the estimate",
    FitVerdict.DOES_NOT_FIT: "does not fit",
}


def verdict_lines(fit: Fit, *, width: int) -> list[Line]:
    """Render the title, the verdict and what needs the memory."""
    need, capacity = fit.need, fit.capacity
    amounts = (
        f"~{format_bytes(need.nbytes)} of {format_bytes(capacity.usable_bytes)} usable, "
        f"+- {DOUBT:.0%}".replace("%", " %")
    )
    return [
        *words(f"{fit.title}, on one {capacity.kind}", width=width, tone=Tone.STRONG),
        *shown(headed("  ", f"{_SAID[fit.verdict]}: {amounts}", width, _TONES[fit.verdict])),
        *shown(headed("  ", ", ".join(_parts(need)), width)),
    ]


def lever_lines(fit: Fit, *, width: int) -> list[Line]:
    """Render the changes that make the step fit, or the one that comes nearest."""
    lines: list[Line] = []
    if fit.levers:
        lines += words("  would fit, cheapest first:", width=width, tone=Tone.STRONG)
    for number, lever in enumerate(fit.levers, start=1):
        lines += shown(headed(f"  {number}  ", _said(lever), width))
    if fit.least is not None:
        lines += words("  no single change makes it fit; the least memory:", width=width)
        lines += shown(headed("  -  ", _said(fit.least), width))
    return lines


def to_json(fit: Fit) -> dict[str, Any]:
    need, capacity = fit.need, fit.capacity
    return {
        "schema": "steelyard.fit/1",
        "title": fit.title,
        "verdict": fit.verdict.value,
        "device": capacity.kind,
        "memory_bytes": capacity.memory_bytes,
        "usable_bytes": capacity.usable_bytes,
        "needed_bytes": need.nbytes,
        "relative_error": DOUBT,
        "weight_bytes": need.weight_bytes,
        "gradient_bytes": need.gradient_bytes,
        "state_bytes": need.state_bytes,
        "working_bytes": need.working_bytes,
        "allocator_bytes": need.allocator_bytes,
        "peak_in": "optimizer step" if need.in_update else "forward and backward pass",
        "would_fit": [_lever(lever) for lever in fit.levers],
        "least": None if fit.least is None else _lever(fit.least),
    }


def _lever(lever: Lever) -> dict[str, Any]:
    return {"changes": list(lever.changes), "pays": lever.pays, "needed_bytes": lever.nbytes}


def _said(lever: Lever) -> str:
    return f"{lever.name}: ~{format_bytes(lever.nbytes)}; pays: {lever.pays}"


def _parts(need: MemoryNeed) -> list[str]:
    working = "temporary results of the optimizer" if need.in_update else "activations"
    parts = (
        ("weights", need.weight_bytes),
        ("gradients", need.gradient_bytes),
        ("optimizer state", need.state_bytes),
        (working, need.working_bytes),
        ("reserved by the allocator", need.allocator_bytes),
    )
    return [f"{name} {format_bytes(nbytes)}" for name, nbytes in parts if nbytes]
