"""A note if a plan needs more memory than eager PyTorch: how much, for what, and how to avoid it.

Not for the comparison with a budget: report/document.py prints that with the plan.
"""

from collections.abc import Iterator

from steelyard.ir.graph import Role
from steelyard.plans.plan import Prediction
from steelyard.units import format_bytes

_MAX_LISTED = 3
# These roles are resident for the whole step, in eager PyTorch too.
_RESIDENT_ROLES = frozenset({Role.PARAMETER, Role.BUFFER, Role.BATCH, Role.CONSTANT, Role.STATE})


def note_beyond_eager(before: Prediction, predicted: Prediction) -> Iterator[str]:
    """Yield a note if the peak of the plan is above that of eager PyTorch, ``before``."""
    peak, eager_bytes = predicted.peak, before.peak.nbytes
    if peak.nbytes <= eager_bytes:
        return
    largest = [holding for holding in peak.alive if holding.role not in _RESIDENT_ROLES][
        :_MAX_LISTED
    ]
    listed = ", ".join(f"{holding.what} {format_bytes(holding.nbytes)}" for holding in largest)
    at = f" at {peak.at} in {peak.path or 'the loss'}, {peak.phase.value} pass" if peak.at else ""
    yield (
        f"the plan needs ~{format_bytes(peak.nbytes - eager_bytes)} more than eager PyTorch: its "
        f"peak is{at}"
        + (f", where the largest are {listed}" if listed else "")
        + f"; a budget of {format_bytes(eager_bytes)} would allow no more than eager PyTorch takes"
    )
