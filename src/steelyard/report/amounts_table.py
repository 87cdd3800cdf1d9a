"""The table of a plan or receipt: amounts of eager PyTorch, without trades, planned and measured.

Not for the text below the table: see document.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from steelyard.plans.plan import Plan
from steelyard.plans.receipt import RunMeasurement
from steelyard.report.quantities import Cell, Quantity, Unit, cell, estimate_of

# A miss smaller than this is printed as zero, so it is not marked as the largest.
_LEAST_MISS = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class AmountRow:
    """One of the four amounts, or the step time; ``miss`` is measured divided by predicted, minus
    1.
    """

    key: str
    label: str
    before: Cell
    unplanned: Cell
    plan: Cell
    measured: Cell = "-"
    miss: float | None = None
    is_outside: bool = False
    is_largest: bool = False


def rows_of(plan: Plan, measured: RunMeasurement | None) -> tuple[AmountRow, ...]:
    before, bare, after = plan.before.metrics, plan.unplanned.metrics, plan.predicted.metrics
    found = measured or RunMeasurement()
    rows = [
        AmountRow(
            key="accuracy_loss",
            label="accuracy loss",
            before=before.accuracy_loss,
            unplanned=bare.accuracy_loss,
            # A note describes the probe.
            plan=after.accuracy_loss.partition(" (")[0],
        ),
        _row("memory_bytes", "memory (peak/rank)", plan, found.memory_bytes),
        _row("communication_seconds", "communication", plan, found.communication_seconds),
        _row("computation_seconds", "computation", plan, found.computation_seconds),
        _row("step_seconds", "step, overlapped", plan, found.step_seconds),
    ]
    worst = max(rows, key=lambda r: abs(r.miss or 0.0))
    if abs(worst.miss or 0.0) < _LEAST_MISS:
        return tuple(rows)
    return tuple(replace(r, is_largest=r is worst) for r in rows)


def _row(key: str, label: str, plan: Plan, measured: float | None) -> AmountRow:
    unit = Unit.BYTES if key == "memory_bytes" else Unit.SECONDS
    before, bare, after = (
        estimate_of(p.metrics, key) for p in (plan.before, plan.unplanned, plan.predicted)
    )
    has_miss = measured is not None and after.value > 0
    return AmountRow(
        key=key,
        label=label,
        before=cell(before, unit),
        unplanned=cell(bare, unit),
        plan=cell(after, unit),
        measured="-" if measured is None else Quantity(value=measured, unit=unit),
        miss=measured / after.value - 1 if has_miss and measured is not None else None,
        is_outside=has_miss and measured is not None and not after.contains(measured),
    )


def outside(rows: Sequence[AmountRow]) -> list[str]:
    """Return notes on measurements outside of the predicted interval, one for each distinct miss.

    On one device, computation and step have the same figures, so they share a note.
    """
    labels: dict[str, list[str]] = {}
    for row in rows:
        if row.is_outside and isinstance(row.plan, Quantity):
            text = f"measured {row.measured}, predicted {row.plan.interval}"
            labels.setdefault(text, []).append(row.label)
    return [f"{' and '.join(names)}: {text}" for text, names in labels.items()]
