"""Renders an export: the settings or the job, their predicted cost beside the plan's, what is lost.

Not for making it: see export/target.py.
"""

from collections.abc import Iterator

from steelyard.export.exported import Exported, ExportPrice
from steelyard.report.styled_text import Line, Tone, headed, shown, words
from steelyard.units import format_bytes, format_seconds

_HEAD = 11


def export_lines(exported: Exported, *, path: str, width: int) -> list[Line]:
    """Render the export that was written to ``path``."""
    title = f"plan {exported.plan} as {exported.target}: {path}"
    lines = [*words(title, width=width, tone=Tone.STRONG)]
    for head, texts in _rows(exported):
        for text in texts:
            lines += shown(headed(f"{head:<{_HEAD}}", text, width))
    if not exported.fits:
        assert exported.budget_bytes is not None
        text = f"no settings of {exported.target} keep the budget of the plan, "
        text += f"{format_bytes(exported.budget_bytes)}"
        lines += shown(headed(f"{'memory':<{_HEAD}}", text, width, Tone.BAD))
    return lines


def _rows(exported: Exported) -> Iterator[tuple[str, tuple[str, ...]]]:
    if exported.settings is not None:
        yield "settings", ("; ".join(exported.settings.described()),)
        yield "predicted", (said(exported.price),)
        yield "the plan", (said(exported.plan_price),)
        yield "lost", exported.lost or ("nothing",)
    else:
        yield "job", exported.job
        yield "lost", exported.lost
    yield "by hand", exported.by_hand
    yield "note", exported.notes


def said(price: ExportPrice | None) -> str:
    """Return the predicted peak and step in words."""
    if price is None:
        return "not predicted"
    memory, seconds = price.memory_bytes, price.step_seconds
    return ", ".join(
        (
            "peak not predicted" if memory is None else f"peak ~{format_bytes(memory.value)}",
            "step not predicted" if seconds is None else f"step ~{format_seconds(seconds.value)}",
        )
    )
