"""A plan as it was read from disk, with what stands beside it.

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
    """The script and the declared cluster that a plan was asked for, as they were typed."""

    script: str = ""
    cluster: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOnFile:
    """Decisions, with the plan that was predicted for them.

    ``plan`` is None where the predictions are missing or the decisions were edited since.
    ``written_sha256`` is the digest of the plan file as Steelyard last wrote it, empty if it never
    did.
    """

    decisions: Decisions
    plan: Plan | None = None
    measured: RunMeasurement | None = None
    is_edited: bool = False
    written_sha256: str = ""
    asked: Asked = Asked()


def explanation_path(path: Path) -> Path:
    """The predictions beside a plan file: ``train.plan.toml`` -> ``train.plan.json``."""
    if path.suffix != ".toml":
        raise BadInput(
            f"{printable(str(path))} is no name for a plan file",
            expected="a name that ends in .toml, such as train.plan.toml",
            remedy=f"call it {printable(path.with_suffix('.plan.toml').name)}",
        )
    return path.with_suffix(".json")
