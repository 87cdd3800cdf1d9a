"""`steelyard why`: every byte of both peaks is in a row, with its reason and the plan's trades."""

import json
from dataclasses import replace

import pytest

from steelyard.plans.lifetimes import Lifetime, MemoryHistory, StepDetail
from steelyard.plans.plan import Plan
from steelyard.report.peak.causes import causes_of
from steelyard.report.peak.rendering import cause_lines, to_json
from steelyard.report.styled_text import plain
from tests.support.sample import DETAIL, MIB, PLAN, hostile, timeline


def unplanned_detail(plan: Plan) -> StepDetail:
    """Return a history in which the tensors of the peak are alive at a single instant, the peak."""
    levels = timeline(9, plan.unplanned.peak.nbytes)
    peak = levels.nbytes.index(max(levels.nbytes))
    alive = tuple(
        Lifetime(
            tensor=tensor, first=peak, last=peak, last_use="aten.mm.default",
            last_path="blocks.0.mlp", is_saved=True,
        )
        for tensor in plan.unplanned.peak.alive
    )  # fmt: skip
    return StepDetail(unplanned=MemoryHistory(timeline=levels, lifetimes=alive))


def test_the_rows_add_up_to_both_peaks() -> None:
    found = causes_of(PLAN, DETAIL, budget_bytes=300 * MIB)
    for nbytes, peak in (
        (sum(row.before_bytes for row in found.rows), PLAN.unplanned.peak),
        (sum(row.after_bytes or 0 for row in found.rows), PLAN.predicted.peak),
    ):
        assert nbytes == sum(tensor.nbytes for tensor in peak.alive)
    sizes = [row.before_bytes for row in found.rows]
    assert sizes == sorted(sizes, reverse=True)
    assert not found.fits_untouched
    assert causes_of(PLAN, DETAIL, budget_bytes=500 * MIB).fits_untouched


def test_a_row_names_the_trades_of_its_module_and_the_reason() -> None:
    found = causes_of(PLAN, unplanned_detail(PLAN), budget_bytes=300 * MIB)
    rows = {row.where: row for row in found.rows}
    mlp = rows["blocks.*.mlp"]
    assert mlp.line == "gpt.py:41"
    assert mlp.count == 4
    assert mlp.trades == ("recompute blocks.*.mlp: gelu (4)",)
    assert mlp.why == ("saved for the backward pass: last read by mm in blocks.*.mlp",)
    assert rows["(optimizer state)"].why == ("the optimizer keeps it from step to step",)
    assert rows["(optimizer state)"].trades == ()
    assert found.step_trades == ("accumulate 2 micro-batches",)


def test_without_trades_there_is_one_column() -> None:
    bare = replace(PLAN, decisions=replace(PLAN.decisions, rules=()), taken=())
    found = causes_of(bare, DETAIL, budget_bytes=None)
    assert found.after is None
    assert all(row.after_bytes is None for row in found.rows)
    text = plain(cause_lines(found, width=100))
    assert "->" not in text
    assert "plain PyTorch needs ~487 MiB\n" in text


def test_the_text_names_the_peaks_and_the_largest_tensors() -> None:
    found = causes_of(PLAN, unplanned_detail(PLAN), budget_bytes=300 * MIB)
    text = plain(cause_lines(found, width=100))
    assert "plain PyTorch needs ~487 MiB of 300 MiB: it runs out of memory, ~187 MiB over" in text
    assert "before   without trades, ~441 MiB in the backward pass" in text
    assert "plan     ~296 MiB in the backward pass" in text
    assert "~136 MiB -> ~78.4 MiB" in text
    assert "the plan: recompute blocks.*.mlp: gelu (4)" in text
    refused = replace(found, refusal="nothing fits 3 MiB")
    assert "nothing fits 3 MiB" not in text
    assert "nothing fits 3 MiB" in plain(cause_lines(refused, width=100))


@pytest.mark.parametrize("width", [20, 40, 100])
def test_hostile_names_stay_on_their_lines(width: int) -> None:
    found = causes_of(hostile("\x1b[2J\u202e<script>" * 20), DETAIL, budget_bytes=1)
    text = plain(cause_lines(found, width=width))
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_json_has_the_figures_of_the_rows() -> None:
    found = causes_of(PLAN, unplanned_detail(PLAN), budget_bytes=300 * MIB)
    document = json.loads(json.dumps(to_json(found)))
    assert document["schema"] == "steelyard.why/1"
    assert document["eager_bytes"] == 487 * MIB
    assert document["before"]["nbytes"] == PLAN.unplanned.peak.nbytes
    assert document["plan"]["nbytes"] == PLAN.predicted.peak.nbytes
    assert [t["before_bytes"] for t in document["tensors"]] == [r.before_bytes for r in found.rows]
    assert [t["plan_bytes"] for t in document["tensors"]] == [r.after_bytes for r in found.rows]
