"""A plan that was read from disk, with its predictions and measurements.

Not for reading it: see plan_files/.
"""

from dataclasses import dataclass
from pathlib import Path

from steelyard.errors import BadInput
from steelyard.plans.plan import Decisions, Plan
from steelyard.plans.receipt import RunMeasurement
from steelyard.safe_text import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The script and the declared cluster of a plan, as typed on the command line."""

    script: str = ""
    cluster: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOnFile:
    """Decisions, with the plan that was predicted for them.

    ``plan`` is None if the predictions are missing, or if the decisions have been edited since.
    ``written_sha256`` is the digest of the plan file as Steelyard last wrote it, or empty.
    """

    decisions: Decisions
    plan: Plan | None = None
    measured: RunMeasurement | None = None
    is_edited: bool = False
    written_sha256: str = ""
    asked: Asked = Asked()


def explanation_path(path: Path) -> Path:
    """Return the path of the predictions of a plan file: ``train.plan.toml`` ->
    ``train.plan.json``.
    """
    if path.suffix != ".toml":
        raise BadInput(
            f"{printable(str(path))} is not a valid name for a plan file",
            expected="a name that ends in .toml, such as train.plan.toml",
            remedy=f"call it {printable(path.with_suffix('.plan.toml').name)}",
        )
    return path.with_suffix(".json")
