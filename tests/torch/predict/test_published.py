"""Published steps: every figure has a source, every layout enough devices, and some times are
reproduced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.published import presets
from benchmarks.published import rows as published
from benchmarks.published.foundry import foundry_rows
from benchmarks.published.held_out import held_out_rows
from benchmarks.published.megatron import megatron_rows
from benchmarks.published.mist import mist_rows
from benchmarks.published.reaches import said_by_presets
from benchmarks.published.rows import Row, naive_seconds, predicted, reaching
from benchmarks.published.sailor import alternatives, ordered_wrongly, regret, sailor_rows
from benchmarks.published.titan import llama_rows
from steelyard.hardware.presets import preset_tables
from tests.support.torch_since import torch_since

_TABLES = (megatron_rows, foundry_rows, llama_rows, sailor_rows, mist_rows, held_out_rows)
_FILES = sorted(path.stem for path in Path(published.__file__).parent.glob("*.csv"))


@pytest.mark.parametrize("name", _FILES)
def test_every_fact_has_a_source(name: str) -> None:
    lines = published.facts(name)
    assert lines
    assert all(line["source"].strip() for line in lines)


@pytest.mark.parametrize("table", _TABLES)
def test_every_row_has_its_devices_and_was_measured(table: Callable[[], list[Row]]) -> None:
    for row in table():
        assert row.layout.num_ranks <= row.cluster.num_devices
        assert row.step_seconds > 0
        # No step computes faster than the peak rate of its devices.
        assert row.rate < row.cluster.device.flops_in("float16")


def test_a_constant_efficiency_is_right_where_efficiency_is_constant() -> None:
    row, *_ = megatron_rows()
    assert naive_seconds(row, [row]) == pytest.approx(row.step_seconds)


def test_presets_contain_the_recorded_fits() -> None:
    """benchmarks/published/all.py fits them again; its last line is recorded."""
    results = Path(published.__file__).parents[1] / "results" / "published.json"
    found = json.loads(results.read_text(encoding="utf-8").splitlines()[1])["reached"]
    assert found == said_by_presets(list(found))
    said = {name for name, table in preset_tables()["device"].items() if "reached" in table}
    assert said == found.keys()


# The efficiency that half of their tables gives, rounded; benchmarks/published/all.py fits it.
_KNOWN = (
    pytest.param(
        megatron_rows,
        "GPT-174.6B on 384, full again",
        0.80,
        5e-6,
        marks=torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12"),
    ),
    (foundry_rows, "mpt-7b of 2048 on 16, full again", 0.80, 5e-6),
    (llama_rows, "Llama-3.1-8B on 8, compiled", 0.85, 5e-6),
)


@pytest.mark.parametrize(("table", "name", "share", "call_seconds"), _KNOWN)
def test_known_steps_are_predicted_within_a_tenth(
    table: Callable[[], list[Row]], name: str, share: float, call_seconds: float
) -> None:
    row = next(row for row in table() if row.name == name)
    found = predicted(row, reaching(row, share, call_seconds)).step_seconds
    assert found == pytest.approx(row.step_seconds, rel=0.1)


def test_measured_times_give_no_wrong_order_and_no_regret() -> None:
    plans: list[Row] = sailor_rows()
    right = {plan: plan.step_seconds for plan in plans}
    wrong = {plan: -plan.step_seconds for plan in plans}
    for group in alternatives(plans):
        assert not ordered_wrongly(group, right)
        assert regret(group, right) == 0
        assert len(ordered_wrongly(group, wrong)) == len(group) * (len(group) - 1) // 2
        assert regret(group, wrong) > 0


def test_calibrations_follow_from_the_recorded_predictions() -> None:
    """benchmarks/published/presets.py writes all of their figures."""
    found = presets.calibration_toml(presets.read_record())
    assert found == presets.PRESET.read_text(encoding="utf-8"), "run that script"


def test_software_with_steps_beyond_the_interval_is_named() -> None:
    steps = [s for s in presets.read_record() if s.device.startswith("A100")]
    odd = [s for s in steps if s.software in ("DeepSpeed", "llm-foundry")]
    lines = list(presets._errors_toml(odd))
    assert 'worst_software = "DeepSpeed"' in lines
    even = [s for s in odd if s.software == "llm-foundry"]
    assert not any(line.startswith("worst") for line in presets._errors_toml(even))


def test_recorded_steps_match_their_tables_and_held_out_steps_were_not_fitted() -> None:
    recorded = {
        (step.table, step.name, step.measured_seconds): step for step in presets.read_record()
    }
    steps = list(presets.published_steps())
    assert len(steps) == len(presets.read_record())
    held_out = {row.table for row in held_out_rows()}
    for row, role in steps:
        step = recorded[row.table, row.name, float(f"{row.step_seconds:.6g}")]
        assert step.role == role
        assert step.devices == row.layout.num_ranks
        assert not (role == "fitted" and row.table in held_out)
    assert {step.role for step in recorded.values()} == {"fitted", "scored"}


# One step of each software and of each kind of layout.
_PREDICTED_ANEW = (
    "GPT-1.7B on 48",
    "Llama-3.1-8B on 128, compiled",
    "Llama-3.1-8B on 64, compiled",
    "GPT-22B on 8, selective again",
    "mpt-1b of 2048 on 128, none again",
    "BERT-0.34B of 512 on 16",
)


@torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12")
@pytest.mark.slow
def test_recorded_predictions_are_reproduced() -> None:
    """If the cost model changes, predictions must be recorded again: presets.py --predict."""
    recorded = {(step.table, step.name): step for step in presets.read_record()}
    found = {row.name: (row, role) for row, role in presets.published_steps()}
    for name in _PREDICTED_ANEW:
        row, role = found[name]
        now = presets.step_of(row, role)
        assert now.predicted_seconds == pytest.approx(
            recorded[row.table, name].predicted_seconds, rel=1e-3
        ), name


def test_tensor_parallel_steps_are_not_overpriced_by_a_quarter() -> None:
    """Plans are priced without async TP; before sequence parallelism, such steps were overpriced
    by 24 and 44 %."""
    steps = [s for s in presets.read_record() if s.table == "titan-tensor"]
    plain = [step for step in steps if "async" not in step.name]
    assert len(plain) == 2
    assert all(abs(step.error) < 0.2 for step in plain)
