"""The receipt of a step as a user sees it, and its notes that explain measured figures.

Not for the figures: see traffic.py, memory_meter.py and user_loop.py.
"""

from collections.abc import Sequence

from steelyard.ir.gradient_codec import CODED_CALLS
from steelyard.ir.rule import Rule, of_kind
from steelyard.ir.rule_kinds import GradientCompression
from steelyard.plans.plan import Plan
from steelyard.plans.receipt import Receipt
from steelyard.predict.cost_table import CostTable
from steelyard.report.document import tree_of
from steelyard.report.html import to_html
from steelyard.report.styled_text import plain
from steelyard.report.text import render
from steelyard.run.finite_check import FiniteWatch, blamed
from steelyard.run.step import LiveStep
from steelyard.units import format_bytes, format_seconds


class ShownReceipt:
    """A receipt with measured and predicted values; printing it shows the explain tree."""

    def __init__(self, receipt: Receipt) -> None:
        self.receipt = receipt
        self.plan, self.measured = receipt.plan, receipt.measured

    def __str__(self) -> str:
        return plain(render(tree_of(self.receipt)))

    def _repr_html_(self) -> str:
        """Return the page that ``steelyard run --html`` writes, for display in a notebook."""
        return to_html(tree_of(self.receipt))


def notes_on_finite(finite: FiniteWatch | None, codes: Sequence[int]) -> tuple[str, ...]:
    """Return a note on the first step with a non-finite loss, and on its source.

    ``codes`` are the non-finite codes of the ranks.
    """
    if finite is None or finite.failed_at is None:
        return ()
    first = blamed(codes).words if codes else ""
    source = f"; first not finite: {first}" if first else ""
    return (f"the loss was not finite in step {finite.failed_at}{source}",)


def notes_on_ranks(plan: Plan, *, waited: float, sent: int | None) -> tuple[str, ...]:
    """Return notes on what a rank waited for others and sent to them, with the prediction."""
    metrics = plan.predicted.metrics
    own, predicted = format_seconds(waited), metrics.exposed_communication_seconds.value
    notes = [f"waited {own} a step for other ranks (predicted ~{format_seconds(predicted)})"]
    if sent is not None:
        own, predicted = format_bytes(sent), metrics.communication_bytes.value
        notes.append(f"sent {own} a step to other ranks (predicted {format_bytes(predicted)})")
    return tuple(notes)


def note_on_coding(live: LiveStep, costs: CostTable, seconds: float) -> str:
    """Return a note on the time of encoding and decoding gradients in a step."""
    nodes = (n for n in live.program.graph.nodes if n.op in CODED_CALLS)
    predicted_seconds = sum(costs.seconds(node).value for node in nodes)
    return (
        f"encoded and decoded gradients in {format_seconds(seconds)} of a step "
        f"(predicted ~{format_seconds(predicted_seconds)})"
    )


def notes_on_fallbacks(live: LiveStep, fallbacks: Sequence[Sequence[Rule]]) -> list[str]:
    """Return notes on exact steps, residuals, and fallbacks to less lossy gradient codecs."""
    if live.guard is None:
        return []
    record, notes = live.guard.record(), list[str]()
    if record.exact_steps:
        notes.append(
            f"{record.exact_steps} steps sent gradients uncompressed and are excluded from all "
            "step figures"
        )
    if any(record.residuals):
        notes.append(
            f"error feedback held at most {max(record.residuals):.2g} steps' worth of "
            f"gradients, in {len(record.residuals)} checks"
        )
    for rung, reason in enumerate(record.reasons, start=1):
        notes.append(
            f"gradients were sent in {_codec_text(fallbacks[rung])} from then on: {reason}"
        )
    return notes


def _codec_text(rules: Sequence[Rule]) -> str:
    codes = {rule.codec.label for rule in of_kind(rules, GradientCompression)}
    return " and ".join(sorted(label.removeprefix("gradients in ") for label in codes)) or "no code"
