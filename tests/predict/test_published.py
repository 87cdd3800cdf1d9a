"""Published steps: every fact has a source, every layout its devices, and some times are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.published import rows as published
from benchmarks.published.foundry import foundry_rows
from benchmarks.published.megatron import megatron_rows
from benchmarks.published.mist import mist_rows
from benchmarks.published.reaches import said_by_presets
from benchmarks.published.rows import Row, naive_seconds, predicted, reaching
from benchmarks.published.sailor import alternatives, ordered_wrongly, regret, sailor_rows
from benchmarks.published.titan import llama_rows
from steelyard.core.presets import preset_tables

_TABLES = (megatron_rows, foundry_rows, llama_rows, sailor_rows, mist_rows)
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
        # None computes faster than its devices can.
        assert row.rate < row.cluster.device.flops_in("float16")


def test_a_constant_efficiency_is_right_where_efficiency_is_constant() -> None:
    row, *_ = megatron_rows()
    assert naive_seconds(row, [row]) == pytest.approx(row.step_seconds)


def test_presets_say_what_is_fitted_and_recorded() -> None:
    """Fitted anew by benchmarks/published/all.py, whose last line is recorded."""
    results = Path(published.__file__).parents[1] / "results" / "published.json"
    found = json.loads(results.read_text(encoding="utf-8").splitlines()[1])["reached"]
    assert found == said_by_presets(list(found))
    said = {name for name, table in preset_tables()["device"].items() if "reached" in table}
    assert said == found.keys()


# What half of their tables gives, rounded; benchmarks/published/all.py fits it.
_KNOWN = (
    (megatron_rows, "GPT-174.6B on 384, full again", 0.80, 5e-6),
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


def test_what_is_measured_orders_itself_rightly_and_regrets_nothing() -> None:
    plans: list[Row] = sailor_rows()
    right = {plan: plan.step_seconds for plan in plans}
    wrong = {plan: -plan.step_seconds for plan in plans}
    for group in alternatives(plans):
        assert not ordered_wrongly(group, right)
        assert regret(group, right) == 0
        assert len(ordered_wrongly(group, wrong)) == len(group) * (len(group) - 1) // 2
        assert regret(group, wrong) > 0
