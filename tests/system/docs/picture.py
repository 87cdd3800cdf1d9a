"""Draws docs/images/memory.svg: measured memory over one step of README's example.

    python -m tests.system.docs.picture

Plans and runs the example as README shows it, then records what the allocator says during one step
of plain PyTorch and one step of the plan. Takes a minute. Not for predicted memory over a step: see
report/svg.py, whose axes are used here.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterable
from contextlib import chdir
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from steelyard.measure.operators.memory import trace
from steelyard.report import svg
from steelyard.units import format_bytes, format_seconds
from tests.system.docs import pages

README = pages.ROOT / "README.md"
PICTURE = pages.ROOT / "docs" / "images" / "memory.svg"
COMMAND = "python -m tests.system.docs.picture"
_TRACES = 3

_STYLE = """
svg { --ink: #1c2330; --soft: #5d6675; --rule: #d9dee6; --page: #ffffff; --plan: #2f6fb3;
  --before: #b26a00; --budget: #b3261e; font: 13px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e9ee; --soft: #a0a9b8; --rule: #343c4a;
  --page: #14181f; --plan: #6ea8e6; --before: #e0a040; --budget: #ff8a80; } }
.page { fill: var(--page); }
.plan { fill: var(--plan); fill-opacity: .3; stroke: var(--plan); stroke-width: 1.5; }
.before { fill: none; stroke: var(--before); stroke-width: 1.5; }
.budget { stroke: var(--budget); stroke-width: 1.2; stroke-dasharray: 6 4; }
.axis { stroke: var(--soft); } .grid { stroke: var(--rule); }
.said { fill: var(--soft); } .strong { fill: var(--ink); font-weight: 600; font-size: 14px; }
text.plan { fill: var(--plan); fill-opacity: 1; stroke: none; font-weight: 600; }
text.before { fill: var(--before); stroke: none; font-weight: 600; }
text.budget { fill: var(--budget); stroke: none; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Measured (seconds, bytes) over one step, and the peak that was predicted for it."""

    levels: tuple[tuple[float, int], ...]
    predicted_peak_bytes: float

    @property
    def seconds(self) -> float:
        return self.levels[-1][0]

    @property
    def peak_bytes(self) -> int:
        return max(nbytes for _, nbytes in self.levels)


def measure(page: str) -> tuple[Curve, Curve, int]:
    """Run a page's example; return plain PyTorch's step, the plan's, and the budget in bytes."""
    session = pages.Session()
    for block in pages.blocks(page):
        if block.language == "python":
            session.take(block)
    names = vars(session.module)
    step, batch, plan = names["step"], names["batch"], names["plan"].plan
    eager_optimizer, eager = _eager_step(names["model"], step.optimizer, names["loss"], batch)
    step.optimizer.zero_grad()
    # Weights, optimizer state and batch stay for the whole step; they are equal in both.
    resident = step.memory_meter.resident_bytes()
    before = Curve(
        levels=_trace(eager, eager_optimizer, resident),
        predicted_peak_bytes=plan.before.metrics.memory_bytes.value,
    )
    after = Curve(
        levels=_trace(lambda: step(batch), step.optimizer, resident),
        predicted_peak_bytes=plan.predicted.metrics.memory_bytes.value,
    )
    measured = step.receipt().measured.memory_bytes
    assert after.peak_bytes == measured, (after.peak_bytes, measured)
    return before, after, plan.decisions.budget.memory_bytes


def _eager_step(
    model: Any, planned: torch.optim.Optimizer, loss: Any, batch: Any
) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    """Return the optimizer and the step of plain PyTorch, on a copy of the model."""
    model = copy.deepcopy(model)
    known = inspect.signature(type(planned)).parameters.keys() & planned.defaults.keys()
    optimizer = type(planned)(
        model.parameters(), **{name: planned.defaults[name] for name in known}
    )

    def step() -> None:
        loss(model, batch).backward()
        optimizer.step()

    step()  # creates the optimizer's state
    return optimizer, step


def _trace(
    step: Callable[[], Any], optimizer: torch.optim.Optimizer, resident: int
) -> tuple[tuple[float, int], ...]:
    """Trace a few steps that begin without gradients, and take the one of median duration."""
    traces = []
    for _ in range(_TRACES):
        optimizer.zero_grad()
        traces.append(trace(step))
    levels = sorted(traces, key=lambda levels: levels[-1][0])[_TRACES // 2]
    return (0.0, resident), *((seconds, resident + nbytes) for seconds, nbytes in levels)


def draw(before: Curve, after: Curve, budget: int) -> str:
    end = max(before.seconds, after.seconds)
    top = max(before.peak_bytes, after.peak_bytes, budget) * 1.12
    axes = svg.Axes(x=(0.0, end), y=(0.0, top))
    right, floor = svg.WIDTH - svg.RIGHT, axes.y(0)
    middle, across = (svg.LEFT + right) / 2, (svg.TOP + floor) / 2
    area = svg.staircase(_thinned(after, axes), axes)
    last = axes.x(after.seconds)
    title = "Measured memory over one training step"
    said = (
        f"{title}. Plain PyTorch: peak {_peak(before)}. With the plan for a budget of "
        f"{format_bytes(budget)}: peak {_peak(after)}."
    )
    parts = [
        f"<title>{title}</title><desc>{said}</desc><style>{_STYLE}</style>",
        f'<rect class="page" width="{svg.WIDTH}" height="{svg.HEIGHT}"/>',
        svg.grid(axes, top),
        f'<polygon class="plan" points="{svg.LEFT},{floor:.1f} {area} {last:.1f},{floor:.1f}"/>',
        f'<polyline class="before" points="{svg.staircase(_thinned(before, axes), axes)}"/>',
        svg.line("budget", svg.LEFT, axes.y(budget), right, axes.y(budget)),
        svg.text(svg.LEFT, 16, title, "start", "strong"),
        svg.text(right, 16, f"plain PyTorch: peak {_peak(before)}", "end", "before"),
        svg.text(right, axes.y(budget) - 6, f"budget {format_bytes(budget)}", "end", "budget"),
        svg.text(middle, floor - 12, f"with the plan: peak {_peak(after)}", "middle", "plan"),
        f'<g transform="rotate(-90 12 {across:.1f})">',
        svg.text(12, across, "memory", "middle"),
        "</g>",
        svg.text(svg.LEFT, svg.HEIGHT - 12, "0 s", "start"),
        svg.text(middle, svg.HEIGHT - 12, "time in the recorded step", "middle"),
        svg.text(right, svg.HEIGHT - 12, format_seconds(end), "end"),
    ]
    return (
        f"<!-- {COMMAND}: torch {torch.__version__} -->\n"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {svg.WIDTH} {svg.HEIGHT}" '
        f'role="img">{"".join(parts)}</svg>\n'
    )


def _peak(curve: Curve) -> str:
    return (
        f"{format_bytes(curve.peak_bytes)} (predicted ~{format_bytes(curve.predicted_peak_bytes)})"
    )


def _thinned(curve: Curve, axes: svg.Axes) -> Iterable[tuple[float, int]]:
    """Return the first and the last level, and between them the highest of each two units."""
    first, *rest, last = curve.levels
    columns = groupby(rest, key=lambda level: int(axes.x(level[0]) / 2))
    highest = (max(levels, key=lambda level: level[1]) for _, levels in columns)
    return first, *highest, last


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        drawing = draw(*measure(README.read_text(encoding="utf-8")))
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
