"""Checks that the given training script exists and is Python, before anything is imported.

Not for loading it: see api/workload.py.
"""

import ast
import shlex
import warnings
from pathlib import Path
from typing import Never

from steelyard.errors import BadInput
from steelyard.safe_text import printable

# The longest hand-written scripts are a hundred times smaller.
_MOST_BYTES = 16 * 2**20


def script_path(train: str) -> Path:
    """``train.py:name`` -> ``train.py``."""
    path, _, name = train.rpartition(":")
    return Path(path if path.endswith(".py") and name.isidentifier() else train)


def refuse_no_script(train: str, verb: str) -> None:
    """Raise BadInput if ``train`` is not a Python script; the error says what it is."""
    path = script_path(train)
    if path.suffix == ".toml":
        check = ("steelyard", "plan", "train.py", "--check", train)
        _refuse(
            path,
            "is a plan or cluster file, not a script",
            remedy=f"give the script to steelyard {verb}; check a plan with {shlex.join(check)}",
        )
    if path.is_dir():
        _refuse(path, "is a folder, not a script")
    if not path.exists():
        _refuse(path, "does not exist" if path.suffix == ".py" else "is not a script")
    if not path.is_file():
        _refuse(path, "is not a regular file")
    if path.suffix != ".py":
        _refuse(path, "is not a script: its name does not end in .py")
    _refuse_no_python(path)


def _refuse_no_python(path: Path) -> None:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}")
    if len(text) > _MOST_BYTES:
        _refuse(path, f"is larger than {_MOST_BYTES // 2**20} MiB")
    try:
        # Python itself prints its warnings when the script runs.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text, filename=str(path))
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        _refuse(path, f"is not Python{line}: {printable(str(error.msg))}")
    except (ValueError, RecursionError, MemoryError) as error:
        _refuse(path, f"is not Python: {printable(str(error)) or 'it is nested too deeply'}")


def _refuse(path: Path, what: str, *, remedy: str = "") -> Never:
    raise BadInput(
        f"{printable(str(path)) or repr(str(path))} {what}",
        expected="a Python script with a function workload()",
        remedy=remedy
        or "check the name; if a script has several workloads, name one as train.py:name",
    )
