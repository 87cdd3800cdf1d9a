"""Checks the counters in a checkpoint that say how far its run had come; needs no torch.

Impossible counters are refused before torch is imported and the step is captured. Not for the rest
of a checkpoint's state: see state.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steelyard.errors import CheckpointError, CheckpointRefused
from steelyard.run.checkpoint.directory import CheckpointFolder, step_of
from steelyard.safe_text import printable

STATE = "state.json"
# The largest number that fits into the name of a checkpoint.
_MAX = 10**12 - 1
_MIN = {"step": 1, "epoch": 0, "taken": 0}
# The state lists every parameter. A file that is larger than this is not a state, and verify()
# reports it.
_MAX_BYTES = 2**28


def refuse_impossible(resume: Path | bool, folder: Path | None) -> None:
    """Refuse the checkpoint to be resumed from if its counters are impossible; skip it if it cannot
    be read.
    """
    if resume is False:
        return
    try:
        chosen = resume if isinstance(resume, Path) else CheckpointFolder(folder or Path()).latest()
        with (chosen / STATE).open("rb") as file:
            state = json.loads(file.read(_MAX_BYTES))
    except (CheckpointError, OSError, ValueError, RecursionError):
        return  # reported when the checkpoint is resumed
    if isinstance(state, dict):
        check_numbers(chosen, state)


def check_numbers(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Raise CheckpointRefused unless the counters are integers within bounds, and match the
    checkpoint's name.
    """
    for name, minimum in _MIN.items():
        found = state.get(name)
        if type(found) is not int or not minimum <= found <= _MAX:
            raise _impossible(checkpoint, f"{name} {_shown(found)}", f"from {minimum} to {_MAX}")
    named = step_of(checkpoint)
    if named not in (-1, state["step"]):
        raise _impossible(checkpoint, f"step {state['step']}", f"{named}, as in its name")


def _shown(found: object) -> str:
    # Python refuses to convert thousands of digits to text.
    if isinstance(found, int) and abs(found) > 10**20:
        return "of more than 20 digits"
    return printable(repr(found), most=40)


def _impossible(checkpoint: Path, what: str, expected: str) -> CheckpointRefused:
    return CheckpointRefused(
        f"{printable(str(checkpoint / STATE))} has {what}, which no run can reach",
        expected=f"a whole number {expected}",
        remedy="resume from another checkpoint, with --resume and its path",
    )
