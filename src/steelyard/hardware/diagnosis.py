"""What a machine is and can do, as rows that say what to do about it.

Not for finding it out: see measure/doctor.py.
"""

from enum import StrEnum
from typing import NamedTuple


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"
    BAD = "bad"


class DoctorRow(NamedTuple):
    """One finding. A row that is not ``ok`` has a remedy."""

    name: str
    value: str
    verdict: Verdict = Verdict.OK
    remedy: str = ""
