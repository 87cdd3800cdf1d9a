"""Type checks of the arguments of public calls, with our own error messages.

Not for checks that examine the model: see planner/preflight.py.
"""

from pathlib import Path
from typing import Any

from torch import nn

from steelyard.errors import BadInput
from steelyard.export.target import ExportTarget
from steelyard.safe_text import printable


def check_model(model: Any) -> None:
    check("model", model, fine=isinstance(model, nn.Module), expected="an nn.Module")


def path_of(path: Any) -> Path:
    check("path", path, fine=isinstance(path, (str, Path)), expected="the name of a plan file")
    return Path(path)


def target_of(target: Any) -> ExportTarget:
    tools = [tool.value for tool in ExportTarget if not tool.is_launcher]
    expected = f"{', '.join(tools[:-1])} or {tools[-1]}"
    check("target", target, fine=target in tools, expected=expected)
    return ExportTarget(target)


def check(name: str, given: Any, *, fine: bool, expected: str) -> None:
    if not fine:
        raise BadInput(
            f"{name} is {printable(repr(given)[:60])}",
            expected=expected,
            remedy="see docs/python-api.md for the accepted values",
        )
