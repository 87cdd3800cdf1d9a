"""The diagnosis of this machine for ``steelyard doctor``.

Not for the checks themselves: see measure/doctor.py.
"""

from steelyard.hardware.diagnosis import DoctorRow
from steelyard.measure.doctor import diagnose


def doctor(*, forget: bool = False) -> tuple[DoctorRow, ...]:
    """Return the diagnosis; with ``forget``, drop cached measurements for the next plan."""
    return diagnose(forget=forget)
