"""A note where a plan holds more than eager PyTorch: how much, what it is, how to avoid it.

Not for the comparison with a budget: the plan says that itself (report/document.py).
"""

from collections.abc import Iterator

from steelyard.ir.graph import Role
from steelyard.plans.plan import Prediction
from steelyard.units import format_bytes

_NAMED = 3
# What stays for the whole step stays in eager PyTorch too.
_STAYS = frozenset({Role.PARAMETER, Role.BUFFER, Role.BATCH, Role.CONSTANT, Role.STATE})


def note_beyond_eager(before: Prediction, predicted: Prediction) -> Iterator[str]:
    """A note if the peak of the plan is above that of eager PyTorch, ``before``."""
    peak, eager_bytes = predicted.peak, before.peak.nbytes
    if peak.nbytes <= eager_bytes:
        return
    held = [holding for holding in peak.alive if holding.role not in _STAYS][:_NAMED]
    listed = ", ".join(f"{holding.what} {format_bytes(holding.nbytes)}" for holding in held)
    at = f" at {peak.at} in {peak.path or 'the loss'}, {peak.phase.value} pass" if peak.at else ""
    yield (
        f"the plan holds ~{format_bytes(peak.nbytes - eager_bytes)} more than eager PyTorch: "
        f"its peak is{at}"
        + (f", where most is {listed}" if listed else "")
        + f"; a budget of {format_bytes(eager_bytes)} asks for no more than eager PyTorch takes"
    )
