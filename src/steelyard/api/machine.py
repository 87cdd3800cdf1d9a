"""What this machine is and can do, for ``steelyard doctor``.

Not for finding that out: see measure/.
"""

from steelyard.hardware.diagnosis import DoctorRow
from steelyard.measure.doctor import diagnose


def doctor(*, forget: bool = False) -> tuple[DoctorRow, ...]:
    """``forget``: what was measured here before is measured again by the next plan."""
    return diagnose(forget=forget)
