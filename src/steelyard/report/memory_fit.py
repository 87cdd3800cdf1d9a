"""Renders the answer to "will it fit", as text and as JSON.

Not for computing it: see planner/memory_fit.py.
"""

from typing import Any

from steelyard.plans.memory_fit import UTILIZATION, Fit, FitVerdict, Lever, MemoryNeed
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
        f"+- {capacity.doubt:.0%}".replace("%", " %")
    )
    return [
        *words(f"{fit.title}, on {_devices(fit)}", width=width, tone=Tone.STRONG),
        *shown(headed("  ", f"{_SAID[fit.verdict]}: {amounts}", width, _TONES[fit.verdict])),
        *shown(headed("  ", ", ".join(_parts(need)), width)),
    ]


def _devices(fit: Fit) -> str:
    kind, count, samples = fit.capacity.kind, fit.capacity.count, fit.samples
    if count == 1:
        return f"one {kind}"
    each = "the whole batch"
    if samples is not None:
        each = f"{samples} sample{'s' * (samples > 1)} ({samples * count} in all)"
    return (
        f"each of {count} {kind} with {each}, where weights, gradients and state are sharded "
        "(FSDP, ZeRO-3)"
    )


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
    if any(_share(lever) for lever in (*fit.levers, fit.least)):
        lines += shown(headed("  ", _SHARES, width))
    return lines


def to_json(fit: Fit) -> dict[str, Any]:
    need, capacity = fit.need, fit.capacity
    return {
        "schema": "steelyard.fit/1",
        "title": fit.title,
        "verdict": fit.verdict.value,
        "device": capacity.kind,
        "devices": capacity.count,
        "memory_bytes": capacity.memory_bytes,
        "usable_bytes": capacity.usable_bytes,
        "needed_bytes": need.nbytes,
        "relative_error": capacity.doubt,
        "weight_bytes": need.weight_bytes,
        "gradient_bytes": need.gradient_bytes,
        "state_bytes": need.state_bytes,
        "working_bytes": need.working_bytes,
        "gathered_bytes": need.gathered_bytes,
        "allocator_bytes": need.allocator_bytes,
        "peak_in": "optimizer step" if need.in_update else "forward and backward pass",
        "would_fit": [_lever(lever) for lever in fit.levers],
        "least": None if fit.least is None else _lever(fit.least),
    }


def _lever(lever: Lever) -> dict[str, Any]:
    return {
        "changes": list(lever.changes),
        "pays": lever.pays,
        "step_share": None if lever.step_share is None else round(lever.step_share, 3),
        "needed_bytes": lever.nbytes,
    }


def _said(lever: Lever) -> str:
    return f"{lever.name}: ~{format_bytes(lever.nbytes)}; pays: {_share(lever)}{lever.pays}"


_SHARES = (
    f"% of a step: its FLOPs at {UTILIZATION * 100:.0f} % of the declared peak, and transfers at "
    "the declared rate of their link, not overlapped"
)


def _share(lever: Lever | None) -> str:
    """Return the time that a change adds to a step, in percent; empty if it is not known."""
    if lever is None or lever.step_share is None:
        return ""
    return f"~+{lever.step_share:.0%} of a step: ".replace("%", " %")


def _parts(need: MemoryNeed) -> list[str]:
    working = "temporary results of the optimizer" if need.in_update else "activations"
    parts = (
        ("weights", need.weight_bytes),
        ("gradients", need.gradient_bytes),
        ("optimizer state", need.state_bytes),
        (working, need.working_bytes),
        ("gathered weights", need.gathered_bytes),
        ("reserved by the allocator", need.allocator_bytes),
    )
    return [f"{name} {format_bytes(nbytes)}" for name, nbytes in parts if nbytes]
