"""Findings about this machine, as rows with a remedy for each problem.

Not for making the findings: see measure/doctor.py.
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
