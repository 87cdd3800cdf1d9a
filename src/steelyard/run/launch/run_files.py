"""Files through which ranks and their launcher communicate: one folder per attempt of a run.

    <run>/attempt-0/store               the rendezvous store
    <run>/attempt-0/rank-1/stdout.log   and stderr.log; those of rank 0 are the launcher's streams
    <run>/attempt-0/rank-1/error.json   the exception that ended the rank
    <run>/attempt-0/rank-1/ask          a pipe: a write into it requests
    <run>/attempt-0/rank-1/answer.json  the rank's position
    <run>/attempt-0/rank-1/unlike.json  exists while the rank waits in an equality check
A restart has a new folder, so that no file of the last attempt is used in the next.
Not for the content of the files: see rank_status.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Tells a rank the path of the folder; if it is set, Steelyard started the rank.
FOLDER_VARIABLE = "STEELYARD_RANK_FOLDER"
_MOST_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    path: Path

    @classmethod
    def of(cls, run: Path, *, attempt: int, rank: int) -> "RankFiles":
        return cls(path=run / f"attempt-{attempt}" / f"rank-{rank}")

    @property
    def store(self) -> Path:
        return self.path.parent / "store"

    @property
    def stdout(self) -> Path:
        return self.path / "stdout.log"

    @property
    def stderr(self) -> Path:
        return self.path / "stderr.log"

    @property
    def error(self) -> Path:
        return self.path / "error.json"

    @property
    def ask(self) -> Path:
        return self.path / "ask"

    @property
    def answer(self) -> Path:
        return self.path / "answer.json"

    @property
    def pending_check(self) -> Path:
        return self.path / "unlike.json"


def write_whole(path: Path, value: Any) -> None:
    """Write a file atomically: a reader sees all of it or nothing."""
    new = path.with_name(f".{path.name}")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.replace(path)


def read_whole(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file, or None if it is absent or malformed."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
