"""Writes the recorded plans anew: ``python -m tests.replay.record [CASE ...]``, all by default."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.replay.cases import RECORDS, cases


def main(names: list[str]) -> None:
    RECORDS.mkdir(exist_ok=True)
    for case in cases():
        if names and case.name not in names:
            continue
        for old in RECORDS.glob(f"{case.name}[-.]*"):
            old.unlink()
        with tempfile.TemporaryDirectory() as folder:
            for made in case.make(Path(folder)):
                for name, text in made.files().items():
                    (RECORDS / name).write_text(text, encoding="utf-8")
        print(case.name)


if __name__ == "__main__":
    main(sys.argv[1:])
