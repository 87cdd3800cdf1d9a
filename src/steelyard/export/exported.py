"""An export: the files for a tool, with what they express, lose and cost.

Not for making one: see target.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.errors import BadInput
from steelyard.export.settings import Settings
from steelyard.ir.metrics import Estimate
from steelyard.safe_files import write_whole
from steelyard.safe_text import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """A file to be written; the text is complete."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolConfiguration:
    """The text of a tool's file, what the user's script has to do, and how training starts."""

    text: str
    by_hand: tuple[str, ...]
    command: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPrice:
    """The predicted cost of exported settings; an amount that is not predicted is None."""

    memory_bytes: Estimate | None
    step_seconds: Estimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An export of a plan.

    ``lost`` are the decisions that the files do not express. ``by_hand`` is what the user's script
    has to do. ``command`` starts the training. ``settings`` is None for a file that launches the
    plan itself: then ``price`` is that of the plan, and ``job`` describes nodes and price.
    """

    target: str
    plan: str
    file: ExportedFile
    settings: Settings | None
    lost: tuple[str, ...] = ()
    by_hand: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""
    price: ExportPrice | None = None
    plan_price: ExportPrice | None = None
    budget_bytes: int | None = None
    job: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """False if the memory of the exported settings is predicted to exceed the plan's budget."""
        price = self.price
        if price is None or price.memory_bytes is None or self.budget_bytes is None:
            return True
        return price.memory_bytes.value <= self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "steelyard.export/1",
            "target": self.target,
            "plan": self.plan,
            "file": self.file.name,
            "settings": None if self.settings is None else self.settings.to_json(),
            "lost": list(self.lost),
            "by_hand": list(self.by_hand),
            "notes": list(self.notes),
            "command": self.command,
            "job": list(self.job),
            "predicted": _price(self.price),
            "predicted_plan": _price(self.plan_price),
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
        }


def write_export(path: Path, file: ExportedFile) -> None:
    """Write the file, unless there is another one of this name that was edited."""
    content = file.text.encode()
    if path.exists() and (not path.is_file() or path.read_bytes() != content):
        name = printable(str(path))
        raise BadInput(
            f"{name} exists, and is not what this export would write",
            expected="no file of this name: settings that were edited are not overwritten",
            remedy=f"delete {name}, or choose another name",
        )
    write_whole(path, content)


def _price(price: ExportPrice | None) -> dict[str, float | None] | None:
    if price is None:
        return None
    memory, seconds = price.memory_bytes, price.step_seconds
    return {
        "memory_bytes": None if memory is None else memory.value,
        "step_seconds": None if seconds is None else seconds.value,
    }
