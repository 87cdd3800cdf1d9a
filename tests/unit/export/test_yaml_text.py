"""Our YAML is read by PyYAML as what was written."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from steelyard.export.yaml_text import to_yaml

TEXTS = (
    "no", "NO", "on", "y", "1e3", "0x1f", "2024-01-01", "~", "", "a: b", "#x", "- y", "H100:8",
    "it's", '"', "\\", " x ", "é\u2028", "null", "True", "4+", "%", "&a", "*a", "!t", "{", "[",
)  # fmt: skip
scalars = st.none() | st.booleans() | st.integers() | st.sampled_from(TEXTS) | st.text("a:-# 1")


@given(scalars)
def test_scalars_read_back(value: str | int | bool | None) -> None:
    document = {"key": value, "no": {"inner": [value, value]}}
    assert yaml.safe_load(to_yaml(document)) == document


@pytest.mark.parametrize(
    "document",
    [
        {"run": "one\ntwo $x | y\n"},
        {"env": [{"name": "A", "from": {"ref": {"key": "b"}}}, {"name": "B"}], "last": 1},
        {"empty": {}, "none": []},
    ],
)
def test_lists_of_mappings_and_blocks_of_lines_read_back(document: dict[str, Any]) -> None:
    text = to_yaml(document, comment=("what", "it is"))
    assert text.startswith("# what\n# it is\n")
    assert yaml.safe_load(text) == document
