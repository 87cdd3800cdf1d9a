"""The JSON of every command: its keys are stable."""

import json

from steelyard.report.document import tree_of
from steelyard.report.json import dumps, to_json
from tests.support.sample import MIB, PLAN, RECEIPT, hostile

KEYS = [
    "schema", "plan", "title", "runner", "budget", "budget_bytes", "fits", "amounts",
    "rules", "num_offers", "taken", "refused", "as_of", "next_cent", "least_bytes", "least_within",
    "largest", "fewest", "ran", "ranks", "stands_in", "notes", "frontier", "peak", "unplanned_peak",
]  # fmt: skip


def test_json_has_the_documented_keys() -> None:
    document = to_json(tree_of(RECEIPT))
    assert list(document) == KEYS
    assert list(document["amounts"]) == [
        "accuracy_loss", "memory_bytes", "communication_seconds", "computation_seconds",
        "step_seconds",
    ]  # fmt: skip
    assert list(document["peak"]) == [
        "nbytes", "resident_bytes", "workspace_bytes", "at", "where", "line", "phase", "alive",
        "rest",
    ]  # fmt: skip


def test_figures_are_numbers_and_words_are_words() -> None:
    memory = to_json(tree_of(RECEIPT))["amounts"]["memory_bytes"]
    assert memory["plan"] == {
        "value": 296 * MIB, "unit": "bytes", "low": 296 * MIB * 0.99, "high": 296 * MIB * 1.01,
    }  # fmt: skip
    assert memory["measured"] == {
        "value": 297 * MIB, "unit": "bytes", "low": None, "high": None
    }  # fmt: skip
    plan = to_json(tree_of(PLAN))
    assert plan["schema"] == "steelyard.plan/1"
    assert plan["amounts"]["memory_bytes"]["measured"] is None
    assert plan["amounts"]["communication_seconds"]["plan"]["value"] == 0
    assert plan["amounts"]["accuracy_loss"]["plan"] == "exact"


def test_json_is_one_line_of_ascii_and_parses() -> None:
    document = to_json(tree_of(hostile("größe \x1b[31m \u2028 \udcff")))
    text = dumps(document)
    assert text.isascii()
    assert text.count("\n") == 1
    assert json.loads(text)["title"] == "größe \x1b[31m \u2028 \udcff"
