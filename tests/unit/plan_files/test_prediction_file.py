"""Damaged predictions of a plan are read as they were, or refused in a few lines."""

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.cli import main
from steelyard.errors import PlanFileError
from steelyard.plan_files.prediction_file import (
    decode_explanation,
    encode_explanation,
    write_explanation,
    write_plan,
)
from steelyard.plans.plan_on_file import PlanOnFile, explanation_path
from steelyard.plans.receipt import Receipt
from steelyard.report.document import tree_of
from steelyard.report.html import to_html
from steelyard.report.json import dumps, to_json
from steelyard.report.styled_text import Zoom
from steelyard.report.text import render
from tests.support.sample import DECISIONS, MEASURED, PLAN

DOCUMENT = json.loads(encode_explanation(PLAN, MEASURED))


def _places(value: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of each value of the document, including tables and arrays."""
    if place:
        yield place
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*place, key))
    elif isinstance(value, list):
        # The other items are like the first.
        for index, inner in enumerate(value[:2]):
            yield from _places(inner, (*place, index))


PLACES = tuple(_places(DOCUMENT))
_MISSING, _EXTRA = object(), object()
WRONG = (
    None, True, "", "nonsense", "\x1b[2J", "\udcff", "x" * 20_000, [], {}, [[]], -1, -1.5, 0, 0.5,
    10**19, 10**400, 1e300, -1e300, float("nan"), float("inf"), -float("inf"), _MISSING, _EXTRA,
)  # fmt: skip


def damaged(place: tuple[str | int, ...], value: object) -> str:
    document: Any = copy.deepcopy(DOCUMENT)
    inner = document
    for part in place[:-1]:
        inner = inner[part]
    if value is _MISSING:
        del inner[place[-1]]
    elif value is _EXTRA:
        if isinstance(inner, dict):
            inner[f"{place[-1]}x"] = 1
        else:
            inner.append(inner[place[-1]])
    else:
        inner[place[-1]] = value
    # An invalid text may contain a lone surrogate; NaN and Infinity are written as Python writes
    # them.
    return json.dumps(document)


def shown(found: PlanOnFile) -> None:
    """Render everything that explain shows; whatever was read must be renderable."""
    assert found.plan is not None
    subject = Receipt(plan=found.plan, measured=found.measured) if found.measured else found.plan
    tree = tree_of(subject)
    for zoom in Zoom:
        assert render(tree, zoom=zoom)
    assert "</html>" in to_html(tree)
    assert json.loads(dumps(to_json(tree)))["plan"] == PLAN.decisions.name


def read_or_refused(raw: str) -> PlanOnFile | PlanFileError:
    try:
        return decode_explanation(raw, DECISIONS)
    except PlanFileError as error:
        refused = error
    assert refused.exit_code == 2
    assert len(str(refused).splitlines()) <= 9
    assert "predictions as Steelyard writes them" in refused.expected
    assert refused.remedy.startswith("create it again: steelyard plan train.py --check ")
    return refused


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(PLACES), st.sampled_from(WRONG))
def test_damaged_predictions_are_refused_or_can_be_shown(
    place: tuple[str | int, ...], value: object
) -> None:
    found = read_or_refused(damaged(place, value))
    if isinstance(found, PlanOnFile) and found.plan is not None:
        shown(found)


@pytest.mark.parametrize(
    "value",
    [-1, -1e300, 1e300, pytest.param(10**400, id="1e400"), float("nan"), float("inf")],
)
def test_impossible_numbers_are_refused_in_every_field(value: float) -> None:
    signed = ("buys_bytes", "pays_seconds", "buys_seconds", "first_loss", "last_loss")
    for place in PLACES:
        inner: Any = DOCUMENT
        for part in place:
            inner = inner[part]
        if type(inner) in (int, float) and not (value == -1 and place[-1] in signed):
            found = read_or_refused(damaged(place, value))
            assert isinstance(found, PlanFileError), (place, value)


def _set(*place: str | int, to: object) -> Callable[[], str]:
    return lambda: damaged(place, to)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_set("plan", "predicted", "metrics", "memory_bytes", "value", to=1.0), "interval"),
        (_set("plan", "predicted", "peak", "nbytes", to=7), "outside the interval of memory_bytes"),
        (_set("plan", "predicted", "peak", "resident_bytes", to=2**40), "more than the peak"),
        (_set("plan", "predicted", "peak", "alive", 0, "nbytes", to=2**40), "more than the peak"),
        (_set("plan", "predicted", "timeline", "seconds", 3, to=9.0), "is not in ascending order"),
        (_set("plan", "predicted", "timeline", "seconds", to=[0.0]), "different numbers of"),
        (_set("plan", "predicted", "timeline", "nbytes", 3, to=2**50), "more than twice the peak"),
        (_set("plan", "predicted", "metrics", "accuracy_loss", to="none at all"), "not a valid"),
        (_set("plan", "frontier", 0, "accuracy_loss", to="none at all"), "not a valid"),
        (_set("plan", "frontier", 0, "micro_batches", to=0), "is 0, not between 1"),
        (_set("plan", "num_offers", to=1), "plan.taken has 2 offers, but the plan had 1"),
        (_set("plan", "num_offers", to=10**9), "plan.num_offers is 1e+09, not between 0 and 1e+06"),
        (_set("measured", "steps", to=10**15), "measured.steps is 1e+15"),
        (_set("measured", "first_step", to=900), "after the last step, 200"),
        (_set("measured", "first_step", to=0), "is 0, not between 1"),
        (_set("measured", "memory_bytes", to=2**70), "measured.memory_bytes is"),
        (_set("decisions_sha256", to="beef"), "not 64 hexadecimal digits"),
        (_set("format", to=3), "format is 3"),
        (lambda: json.dumps(DOCUMENT)[:-200], "is not JSON"),
        (lambda: "", "is not JSON"),
    ],
)  # fmt: skip
def test_impossible_values_are_named(make: Callable[[], str], said: str) -> None:
    found = read_or_refused(make())
    assert isinstance(found, PlanFileError)
    assert said in found.happened


def test_computation_that_takes_longer_than_its_step_is_refused() -> None:
    place = ("plan", "predicted", "metrics", "computation_seconds")
    found = read_or_refused(damaged(place, {"value": 1e5, "low": 1e5, "high": 1e5}))
    assert isinstance(found, PlanFileError)
    assert "longer than the step of 1.24 s" in found.happened


def _folder(beside: Path) -> None:
    beside.mkdir()


def _loop(beside: Path) -> None:
    beside.symlink_to(beside.name)


def _nowhere(beside: Path) -> None:
    beside.symlink_to("nowhere")


def _fifo(beside: Path) -> None:
    os.mkfifo(beside)


def _latin(beside: Path) -> None:
    beside.write_bytes(json.dumps(DOCUMENT, ensure_ascii=False).encode().replace(b"gpt", b"\xe9"))


def _empty(beside: Path) -> None:
    beside.write_bytes(b"")


def _endless(beside: Path) -> None:
    beside.symlink_to("/dev/zero")


@pytest.mark.parametrize("spoil", [_folder, _loop, _nowhere, _fifo, _latin, _empty, _endless])
def test_explain_refuses_other_json_files(
    spoil: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.plan.toml"
    write_plan(path, PLAN)
    beside = explanation_path(path)
    beside.unlink()
    spoil(beside)
    for more in ([], ["--html", str(tmp_path / "page.html")], ["--json"], ["--zoom", "peak"]):
        assert main(["explain", str(path), *more]) == 2
        said = capsys.readouterr().err
        assert len(said.splitlines()) <= 5, said
        assert "Traceback" not in said
        assert "next: create it again" in said.replace("delete it, and ", "")
    assert not (tmp_path / "page.html").exists()


def test_damaged_predictions_are_replaced_by_new_ones(tmp_path: Path) -> None:
    """This is what the refusal advises."""
    path = tmp_path / "train.plan.toml"
    write_plan(path, PLAN)
    explanation_path(path).write_text("{")
    write_explanation(path, PLAN)
    assert json.loads(explanation_path(path).read_bytes()).keys() == DOCUMENT.keys()
