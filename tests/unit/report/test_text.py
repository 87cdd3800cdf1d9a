"""The plan and the receipt as text: golden files, and laws that hold at every width."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.ir.metrics import Estimate
from steelyard.plans.budget import Budget
from steelyard.plans.plan import NextCent, Plan
from steelyard.plans.receipt import Receipt, RunMeasurement
from steelyard.plans.trade import Rejection, Remaining
from steelyard.report.document import describe_rule, tree_of
from steelyard.report.peak_groups import short_op, starred_path
from steelyard.report.quantities import Quantity
from steelyard.report.styled_text import Zoom, plain
from steelyard.report.text import render
from steelyard.trades.gradient_compression import QuantizedGradientsRule
from steelyard.trades.shard_pipeline import ShardPipelineRule
from tests.support.sample import MEASURED, MIB, PLAN, RECEIPT, held, hostile, prediction

GOLDEN = Path(__file__).parent / "golden"
SUBJECTS: dict[str, Plan | Receipt] = {"plan": PLAN, "receipt": RECEIPT}


def shown(subject: Plan | Receipt, *, width: int = 100, zoom: Zoom = Zoom.RECEIPT) -> str:
    return plain(render(tree_of(subject), width=width, zoom=zoom))


@pytest.mark.parametrize("width", [40, 80, 110])
@pytest.mark.parametrize("name", SUBJECTS)
def test_the_printed_receipt_is_the_golden_one(name: str, width: int) -> None:
    golden = GOLDEN / f"{name}-{width}.txt"
    assert shown(SUBJECTS[name], width=width) == golden.read_text()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.002, "pays ~2.00 ms computation, ~1.00 MiB memory"), (-3e-4, "pays ~1.00 MiB memory")],
)
def test_memory_of_codecs_is_paid_even_if_they_save_time(seconds: float, said: str) -> None:
    taken = replace(
        PLAN.taken[0], trade="ternary_gradients", buys_bytes=-MIB, buys_seconds=0.02,
        pays_seconds=seconds,
    )  # fmt: skip
    assert tree_of(replace(PLAN, taken=(taken,))).taken[0].paying == said


@pytest.mark.parametrize("zoom", ["offers", "peak", "frontier"])
def test_each_printed_zoom_is_the_golden_one(zoom: str) -> None:
    golden = GOLDEN / f"{zoom}-80.txt"
    assert shown(RECEIPT, width=80, zoom=Zoom(zoom)) == golden.read_text()


@settings(deadline=None)
@given(st.integers(40, 200), st.sampled_from(list(Zoom)), st.sampled_from(list(SUBJECTS)))
def test_no_line_is_wider_than_the_terminal(width: int, zoom: Zoom, name: str) -> None:
    for line in shown(SUBJECTS[name], width=width, zoom=zoom).splitlines():
        assert len(line) <= width, line


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300), st.integers(40, 120), st.sampled_from(list(Zoom)))
def test_only_printable_lines_are_written_for_any_name(name: str, width: int, zoom: Zoom) -> None:
    text = shown(hostile(name), width=width, zoom=zoom)
    assert text.replace("\n", "").isprintable()
    assert len(text.split("\n")) < 4000


def test_the_four_amounts_stand_in_their_order_and_then_the_step() -> None:
    labels = [row.label for row in tree_of(RECEIPT).rows]
    assert labels == [
        "accuracy loss",
        "memory (peak/rank)",
        "communication",
        "computation",
        "step, overlapped",
    ]


def test_a_tilde_stands_before_each_prediction_and_no_measurement() -> None:
    for row in tree_of(RECEIPT).rows:
        for cell in (row.before, row.unplanned, row.plan):
            assert not isinstance(cell, Quantity) or str(cell).startswith("~") or not cell.value
        assert not str(row.measured).startswith("~")


def test_the_largest_miss_is_marked_and_amounts_outside_their_interval_are_named() -> None:
    rows = tree_of(RECEIPT).rows
    assert [r.key for r in rows if r.is_largest] == ["step_seconds"]
    assert rows[-1].miss == pytest.approx(1.45 / 1.24 - 1)
    assert [r.key for r in rows if r.is_outside] == ["step_seconds"]
    assert "step, overlapped: measured 1.45 s, predicted between 1.09 s and 1.39 s" in shown(
        RECEIPT, width=200
    )


def test_computation_and_step_that_missed_alike_are_named_once() -> None:
    slow = replace(MEASURED, computation_seconds=2.0, step_seconds=2.0)
    tree = tree_of(Receipt(plan=PLAN, measured=slow))
    assert [r.key for r in tree.rows if r.is_largest] == ["computation_seconds"]
    said = "computation and step, overlapped: measured 2.00 s, predicted between 1.09 s and 1.39 s"
    assert tree.notes == (*PLAN.notes, said)


def test_a_run_without_misses_marks_none() -> None:
    exact = RunMeasurement(
        steps=3, memory_bytes=296 * MIB, computation_seconds=1.24, step_seconds=1.24
    )
    text = shown(Receipt(plan=PLAN, measured=exact))
    assert "largest miss" not in text
    assert "+0.0 %" in text


def test_unmeasured_amounts_are_a_dash_and_no_miss() -> None:
    row = tree_of(Receipt(plan=PLAN, measured=RunMeasurement())).rows[1]
    assert (row.measured, row.miss) == ("-", None)


@pytest.mark.parametrize(
    ("memory", "before", "verdict"),
    [
        ("300 MiB", PLAN.before, "fits: ~296 MiB of 300 MiB; eager PyTorch is ~187 MiB over"),
        ("1 GiB", PLAN.before, "fits: ~296 MiB of 1.00 GiB; so does eager PyTorch"),
        ("200 MiB", PLAN.before, "DOES NOT FIT: ~296 MiB of 200 MiB; eager PyTorch is ~287 MiB"),
        (None, PLAN.before, "no memory budget was given"),
    ],
)
def test_the_first_line_says_if_the_plan_fits(
    memory: str | None, before: object, verdict: str
) -> None:
    decisions = replace(PLAN.decisions, budget=Budget(memory))
    assert verdict in shown(replace(PLAN, decisions=decisions), width=120)


def test_a_measured_peak_decides_whether_it_fitted() -> None:
    tree = tree_of(Receipt(plan=PLAN, measured=replace(MEASURED, memory_bytes=301 * MIB)))
    assert not tree.fits
    assert tree.verdict.startswith("DOES NOT FIT: 301 MiB of 300 MiB")


def test_refusals_with_one_reason_are_grouped() -> None:
    more = tuple(
        Rejection(trade="recompute", label=f"blocks.{i}", reason=f"reason {i}") for i in range(9)
    )
    many = replace(PLAN, refused=PLAN.refused * 10 + more)
    text = shown(many, width=120)
    assert "accumulate  4 micro-batches and 9 more: would add" in text
    assert "and 7 more: --zoom offers" in text
    assert shown(many, zoom=Zoom.OFFERS).count("softmax") == 10


def test_a_plan_without_anything_to_say_is_short() -> None:
    undecided = replace(PLAN.decisions, rules=())
    bare = replace(
        PLAN,
        decisions=undecided,
        taken=(),
        refused=PLAN.refused * 2,
        frontier=(),
        next_cent=None,
        least_bytes=0,
        notes=(),
    )
    assert "taken (0 of 4 offers): none needed" in shown(bare)
    assert "no curve was computed" in shown(bare, zoom=Zoom.FRONTIER)


# --- live memory at the peak ----------------------------------------------------------------------


def test_live_bytes_are_grouped_without_loss() -> None:
    peak = tree_of(PLAN).peak
    assert sum(g.nbytes for g in peak.groups) == sum(h.nbytes for h in PLAN.predicted.peak.alive)
    mlp = next(g for g in peak.groups if g.where == "blocks.*.mlp (4)")
    assert (mlp.line, mlp.what, mlp.count) == ("gpt.py:41", ("gelu",), 4)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 99), st.sampled_from(["", "a.0", "a.1", "b"]), st.integers(0, 40)),
        max_size=80,
    )
)
def test_the_top_and_the_rest_are_all_there_is(found: list[tuple[int, str, int]]) -> None:
    alive = tuple(held(mib, "aten.mm.default", path, f"x.py:{line}") for mib, path, line in found)
    peak = replace(PLAN.predicted.peak, alive=alive)
    tree = tree_of(replace(PLAN, predicted=replace(PLAN.predicted, peak=peak))).peak
    assert len(tree.groups) <= 20
    assert sum(g.nbytes for g in tree.groups) + tree.rest_bytes == sum(h.nbytes for h in alive)
    sizes = [g.nbytes for g in tree.groups]
    assert sizes == sorted(sizes, reverse=True)
    assert tree.num_rest == 0 or tree.rest_bytes <= tree.num_rest * sizes[-1]


def test_names_are_shortened_only_where_nothing_is_lost() -> None:
    assert short_op("aten.bmm.default") == "bmm"
    assert short_op("aten.bmm.default (again)") == "bmm (again)"
    assert short_op("optimizer state") == "optimizer state"
    assert starred_path("blocks.3.mlp") == "blocks.*.mlp"
    assert starred_path("blocks.3") == "blocks.*"
    # Layers of one nn.Sequential share a source line, but are not grouped for that.
    assert starred_path("blocks.3.mlp.0") == "blocks.*.mlp.0"
    assert starred_path("layer1.conv2") == "layer1.conv2"


# --- the curve ------------------------------------------------------------------------------------


def test_the_plot_has_a_mark_for_every_plan_and_a_star_for_this_one() -> None:
    text = shown(PLAN, zoom=Zoom.FRONTIER)
    drawn = "".join(l.split("|")[1] for l in text.splitlines() if "|" in l)
    assert drawn.count("o") == len(PLAN.frontier) - 1
    assert drawn.count("*") == 1
    assert len(re.findall(r"MiB +~[0-9.]+ s", text)) == len(PLAN.frontier)


def test_a_plan_between_two_points_of_the_curve_is_drawn_as_one_more() -> None:
    between = replace(PLAN, frontier=tuple(p for p in PLAN.frontier if not p.rules))
    marked = [p for p in tree_of(between).curve if p.is_this_plan]
    assert [(p.memory.value, p.step.value, p.micro_batches) for p in marked] == [
        (296 * MIB, 1.24, 2)
    ]
    assert shown(between, zoom=Zoom.FRONTIER) == shown(PLAN, zoom=Zoom.FRONTIER)
    # Rules read from a file are sorted, and old times may be slightly different floats.
    decisions = replace(PLAN.decisions, rules=tuple(reversed(PLAN.decisions.rules)))
    other = replace(PLAN, decisions=decisions, predicted=prediction(296, 1.2400001))
    assert [p.is_this_plan for p in tree_of(other).curve].count(True) == 1


def test_a_negative_payment_is_shown_as_a_saving() -> None:
    taken = tuple(replace(t, pays_seconds=-t.pays_seconds) for t in PLAN.taken)
    text = shown(replace(PLAN, taken=taken))
    assert "saves ~50.0 ms" in text
    assert "~-" not in text


def test_a_codec_that_saves_computation_says_by_what() -> None:
    """The text explains it: bytes that are not exchanged take no processor time."""
    coded = replace(PLAN.taken[0], trade="quantized_gradients", pays_seconds=-0.004, buys_bytes=0)
    text = " ".join(shown(replace(PLAN, taken=(coded,)), width=200).split())
    said = "saves ~4.00 ms computation (exchanging fewer bytes takes less processor time)"
    assert said in text
    paid = replace(coded, pays_seconds=0.004)
    assert "exchanging fewer bytes" not in shown(replace(PLAN, taken=(paid,)))


def test_offers_that_are_taken_in_part_or_never_made_are_counted_apart() -> None:
    rest, never = (
        replace(PLAN.refused[0], left=left) for left in (Remaining.REST, Remaining.NEVER)
    )
    text = shown(replace(PLAN, num_offers=5, refused=(*PLAN.refused, rest, never)))
    assert "taken (2 of 5 offers, and 1 in part)" in text
    assert "refused (2 of 5 offers, the rest of 1, and 1 that cannot be offered)" in text
    offers = replace(PLAN, refused=(rest,))
    assert "the rest of blocks.*.attn: softmax (4): would buy" in shown(offers, zoom=Zoom.OFFERS)
    every = replace(PLAN, refused=(replace(rest, label="everything (200)"),))
    assert "recompute  all other values (200): would buy" in shown(every, zoom=Zoom.OFFERS)


def test_the_reason_against_the_fastest_codec_comes_first() -> None:
    codes = [
        Rejection(
            trade=trade, label="compressed gradients", reason=f"would cost {more} %", left=left
        )
        for trade, more, left in (
            ("top_k_gradients", 9, Remaining.NEVER),
            ("ternary_gradients", 4, Remaining.WHOLE),
            ("quantized_gradients", 8, Remaining.WHOLE),
        )
    ]
    others = [replace(PLAN.refused[0], reason=f"reason {n}") for n in range(9)]
    plan = replace(PLAN, refused=(*others, *codes))
    text = shown(plan)
    assert text.index("ternary_gradients  compressed gradients: would cost 4 %") < text.index(
        "reason 0"
    )
    assert "would cost 8 %" not in text
    assert "would cost 9 %" not in text
    coded = QuantizedGradientsRule(format="int8", parameter="blocks.0", count=1)
    sent = replace(plan, decisions=replace(PLAN.decisions, rules=(*PLAN.decisions.rules, coded)))
    assert "would cost" not in shown(sent)


def test_rounding_of_sums_is_no_payment() -> None:
    taken = tuple(replace(t, pays_seconds=1e-17) for t in PLAN.taken)
    cent = NextCent(more_bytes=MIB, saved_seconds=1e-17)
    text = shown(replace(PLAN, taken=taken, next_cent=cent))
    assert "pays nothing" in text
    assert "next cent" not in text


def test_stored_reasons_state_when_they_were_found() -> None:
    said = "offers, curve and next cent are from planning, when a step took ~1.10 s"
    plan = replace(PLAN, planned_seconds=1.1)
    for zoom in (Zoom.RECEIPT, Zoom.OFFERS, Zoom.FRONTIER):
        assert said in shown(plan, zoom=zoom)
        assert "from planning" not in shown(replace(PLAN, planned_seconds=1.24), zoom=zoom)


def test_the_measured_slowdown_is_printed_beside_the_unplanned_step() -> None:
    ratio = Estimate(value=1.074, low=1.04, high=1.108)
    text = shown(replace(PLAN, slowdown=ratio), width=200)
    assert (
        "a step; the plan's forward and backward pass take ~1.07 times as long (1.04 to 1.11)"
        in text
    )
    assert "times as long" not in shown(PLAN, width=200)


def test_stage_ends_are_named_as_such() -> None:
    rule = ShardPipelineRule(behind="blocks.1", schedule="1F1B", ranks=2)
    said = "shard_pipeline: 1F1B on 2 ranks, a stage ends after blocks.1"
    assert describe_rule(rule) == said
