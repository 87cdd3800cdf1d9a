"""Data about a plan: predictions, reasons and measurements, as a generated JSON file.

The file contains a digest of the decisions, so that predictions from before an edit are never shown
for the edited plan. Not for the decisions: see plan_file.py.
"""

import json
import os
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from steelyard.errors import BadInput, PlanFileError
from steelyard.ir.metrics import Estimate
from steelyard.plan_files.plan_file import (
    FORMAT,
    digest_of,
    digest_of_text,
    read_decisions,
    write_decisions,
)
from steelyard.plans.plan import Decisions, FrontierPoint, NextCent, Plan, Prediction, SelectedTrade
from steelyard.plans.plan_on_file import Asked, PlanOnFile, explanation_path
from steelyard.plans.plausibility import MOST_INSTANTS, implausible
from steelyard.plans.receipt import RunMeasurement
from steelyard.plans.trade import Rejection
from steelyard.safe_files import STRICT, json_model, read_bytes, refusal, write_whole
from steelyard.safe_text import printable

MOST_BYTES = 64 * 2**20


def refuse_to_lose(path: Path) -> None:
    """Raise an error if writing would overwrite a plan file that a person wrote or edited."""
    explanation_path(path)
    if not path.exists():
        return
    try:
        is_ours = read_plan(path).written_sha256 == digest_of_text(path)
    except PlanFileError:
        is_ours = False
    if not is_ours:
        name = printable(str(path))
        raise BadInput(
            f"{name} was edited or written elsewhere, and would be overwritten",
            expected="an unedited plan file, or none",
            remedy=f"keep it and choose another name with -o, or delete {name}",
        )


def write_plan(path: Path, plan: Plan, *, asked: Asked | None = None) -> None:
    """Write the decisions to ``path`` and everything else to the JSON file."""
    asked = asked or Asked()
    explanation_path(path)
    written = write_decisions(path, plan.decisions, script=asked.script)
    raw = encode_explanation(plan, written_sha256=written, asked=asked)
    write_whole(explanation_path(path), raw)


def write_explanation(path: Path, plan: Plan, measured: RunMeasurement | None = None) -> None:
    """Write the JSON file only; the plan file keeps its edits and comments."""
    try:
        # A plan that was edited is still an edited plan after a check or a run.
        before = read_plan(path)
        written, asked = before.written_sha256, before.asked
    except PlanFileError:
        written, asked = "", Asked()
    raw = encode_explanation(plan, measured, written_sha256=written, asked=asked)
    write_whole(explanation_path(path), raw)


def with_reasons(plan: Plan, path: Path) -> Plan:
    """Return ``plan`` with the reasons of its original planning, if the decisions are unchanged.

    If stored decisions are predicted again, no offers are compared and no curve is computed.
    Predicted times vary between runs, so the reasons name the time to which they refer. If the peak
    memory of the step has changed, the reasons no longer apply, and a note replaces them.
    """
    if plan.num_offers:
        return plan
    try:
        found = read_plan(path).plan
    except PlanFileError:
        # The JSON is damaged and about to be rewritten; only the reasons are lost with it.
        return plan
    if found is None or digest_of(found.decisions) != digest_of(plan.decisions):
        return plan
    if not found.num_offers:
        return plan
    if _peaks(found) != _peaks(plan):
        note = (
            "the step needs a different amount of memory than when it was planned: plan again to "
            "get the reasons"
        )
        return replace(plan, notes=(*plan.notes, note))
    planned_seconds = found.planned_seconds
    if planned_seconds is None and found.predicted.metrics != plan.predicted.metrics:
        planned_seconds = found.predicted.metrics.step_seconds.value
    return replace(
        plan,
        taken=found.taken,
        refused=found.refused,
        num_offers=found.num_offers,
        frontier=found.frontier,
        next_cent=found.next_cent,
        least_bytes=found.least_bytes,
        least_within=found.least_within,
        planned_seconds=planned_seconds,
        largest=found.largest,
        fewest=found.fewest,
    )


def _peaks(plan: Plan) -> tuple[int, int]:
    return plan.unplanned.peak.nbytes, plan.predicted.peak.nbytes


def read_plan(path: Path) -> PlanOnFile:
    decisions = read_decisions(path)
    json_path = explanation_path(path)
    # A dangling link is not a missing file.
    if not os.path.lexists(json_path):
        return PlanOnFile(decisions=decisions)
    try:
        raw = read_bytes(json_path, most_bytes=MOST_BYTES)
    except PlanFileError as error:
        remedy = f"delete it, and {_remedy(path.name)}"
        raise PlanFileError(error.happened, expected=_EXPECTED, remedy=remedy) from None
    return decode_explanation(raw, decisions, source=str(json_path), plan_name=path.name)


def encode_explanation(
    plan: Plan,
    measured: RunMeasurement | None = None,
    *,
    written_sha256: str = "",
    asked: Asked | None = None,
) -> bytes:
    thin = replace(
        plan,
        before=_thinned(plan.before),
        unplanned=_thinned(plan.unplanned),
        predicted=_thinned(plan.predicted),
    )
    body = asdict(thin)
    del body["decisions"]
    document = {
        "format": FORMAT,
        "decisions_sha256": digest_of(plan.decisions),
        "written_sha256": written_sha256,
        "plan": body,
        "measured": None if measured is None else asdict(measured),
        "asked": asdict(asked or Asked()),
    }
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # File names that cannot be decoded contain lone surrogates, which are not valid in JSON.
    return text.encode("utf-8", errors="replace") + b"\n"


def decode_explanation(
    raw: bytes | str,
    decisions: Decisions,
    *,
    source: str = "the predictions",
    plan_name: str = "train.plan.toml",
) -> PlanOnFile:
    try:
        return _decoded(raw, decisions, source)
    except PlanFileError as error:
        remedy = _remedy(plan_name)
        raise PlanFileError(error.happened, expected=_EXPECTED, remedy=remedy) from None


_EXPECTED = "predictions as Steelyard writes them"


def _remedy(plan_name: str) -> str:
    return f"create it again: steelyard plan train.py --check {printable(shlex.quote(plan_name))}"


def _decoded(raw: bytes | str, decisions: Decisions, source: str) -> PlanOnFile:
    document = json_model(raw, _Document, source=source, most_bytes=MOST_BYTES)
    if document.decisions_sha256 != digest_of(decisions):
        return PlanOnFile(
            decisions=decisions,
            is_edited=True,
            written_sha256=document.written_sha256,
            asked=document.asked,
        )
    body: dict[str, Any] = dict(document.plan)
    plan = Plan(decisions=decisions, **body)
    if problems := implausible(plan, document.measured):
        raise refusal(source, problems)
    return PlanOnFile(
        decisions=decisions,
        plan=plan,
        measured=document.measured,
        written_sha256=document.written_sha256,
        asked=document.asked,
    )


class _Body(BaseModel):
    """A Plan without its decisions; a test verifies that the fields are the same."""

    model_config = STRICT

    title: str
    before: Prediction
    unplanned: Prediction
    predicted: Prediction
    taken: tuple[SelectedTrade, ...]
    refused: tuple[Rejection, ...]
    num_offers: int
    frontier: tuple[FrontierPoint, ...]
    next_cent: NextCent | None
    least_bytes: int
    least_within: int
    slowdown: Estimate | None
    # Older files do not have this field.
    planned_seconds: float | None = None
    largest: str
    fewest: str = ""
    predicted_for: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")] = ""
    notes: tuple[str, ...]


class _Document(BaseModel):
    model_config = STRICT

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    decisions_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    written_sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    plan: _Body
    measured: RunMeasurement | None
    # Older files do not have this field.
    asked: Asked = Asked()


def _thinned(prediction: Prediction) -> Prediction:
    timeline = prediction.timeline
    if timeline is None:
        return prediction
    return replace(prediction, timeline=timeline.thinned(MOST_INSTANTS))
