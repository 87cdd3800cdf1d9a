"""The numbers by which a checkpoint says how far its run had come; read without torch.

So that one which no run can have saved is refused before torch is imported and the step captured.
Not for the rest of its state: see state.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steelyard.errors import CheckpointError, CheckpointRefused
from steelyard.run.checkpoint.directory import CheckpointFolder, step_of
from steelyard.safe_text import printable

STATE = "state.json"
# As many digits as the name of a checkpoint has at most.
_MOST = 10**12 - 1
_LEAST = {"step": 1, "epoch": 0, "taken": 0}
# The state names every parameter; more than this is no state, and verify() tells what it is.
_MOST_BYTES = 2**28


def refuse_impossible(resume: Path | bool, folder: Path | None) -> None:
    """Look at the checkpoint that a run is to go on from, if it is there and can be read."""
    if resume is False:
        return
    try:
        chosen = resume if isinstance(resume, Path) else CheckpointFolder(folder or Path()).latest()
        with (chosen / STATE).open("rb") as file:
            state = json.loads(file.read(_MOST_BYTES))
    except (CheckpointError, OSError, ValueError, RecursionError):
        return  # said in other words, and by whom it concerns, when it is resumed
    if isinstance(state, dict):
        check_numbers(chosen, state)


def check_numbers(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Whole, within bounds, and the step that the checkpoint is named for."""
    for name, least in _LEAST.items():
        found = state.get(name)
        if type(found) is not int or not least <= found <= _MOST:
            raise _impossible(checkpoint, f"{name} {_shown(found)}", f"from {least} to {_MOST}")
    named = step_of(checkpoint)
    if named not in (-1, state["step"]):
        raise _impossible(checkpoint, f"step {state['step']}", f"{named}, as it is named")


def _shown(found: object) -> str:
    # Python refuses to spell out thousands of digits.
    if isinstance(found, int) and abs(found) > 10**20:
        return "of more than 20 digits"
    return printable(repr(found), most=40)


def _impossible(checkpoint: Path, what: str, expected: str) -> CheckpointRefused:
    return CheckpointRefused(
        f"{printable(str(checkpoint / STATE))} says {what}, which no run can have come to",
        expected=f"a whole number, {expected}",
        remedy="resume from another checkpoint, with --resume and its path",
    )
