"""Where ranks and their launcher leave word for each other: one folder for each try of a run.

    <run>/attempt-0/store               where ranks find each other's addresses
    <run>/attempt-0/rank-1/stdout.log   and stderr.log; those of rank 0 go through instead
    <run>/attempt-0/rank-1/error.json   what ended the rank, in its own words
    <run>/attempt-0/rank-1/ask          a pipe: whoever writes into it gets
    <run>/attempt-0/rank-1/answer.json  where the rank is
    <run>/attempt-0/rank-1/unlike.json  while it asks whether all ranks have the same as it has
A restart has a new folder, so that nothing of the last try is believed in the next.
Not for what is in the files: see rank_status.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Tells a rank its folder, and by being there that Steelyard started it.
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
    def unlike(self) -> Path:
        return self.path / "unlike.json"


def write_whole(path: Path, value: Any) -> None:
    """A reader sees all of it or nothing."""
    new = path.with_name(f".{path.name}")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.replace(path)


def read_whole(path: Path) -> dict[str, Any] | None:
    """What was written; nothing if it is not there or not what we write."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
