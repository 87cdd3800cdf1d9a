"""Graphs and devices that are sent to another process as JSON arrive unchanged."""

from dataclasses import fields

import pytest

from steelyard.hardware.host_os import this_device
from steelyard.ir.graph import Axis, Graph, Ref, Symbol
from steelyard.measure.links.json_graph import from_json, to_json
from tests.torch.measure.operators.test_benchmark import some_graph


def test_a_graph_is_equal_in_every_field_after_json() -> None:
    graph = some_graph()
    again = from_json(to_json(graph))
    assert isinstance(again, Graph)
    for field in fields(Graph):
        assert getattr(again, field.name) == getattr(graph, field.name), field.name


@pytest.mark.parametrize(
    "value",
    [
        (Ref("a"), Axis("a"), Symbol("torch.float32"), 1, 1.0, True, None, "a", 1 + 2j),
        (float("inf"), float("-inf"), (), ((1,), "x")),
        this_device(ranks=2),
    ],
)
def test_a_value_keeps_its_types_through_json(value: object) -> None:
    again = from_json(to_json(value))
    assert again == value
    assert repr(again) == repr(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"Popen": {"args": "id"}}',
        '{"Ref": {"nobody": 1}}',
        '{"Role": "king"}',
        '{"Ref": {"name": "a"}, "Axis": {"name": "b"}}',
        "[" * 100_000,
    ],
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="an invalid graph"):
        from_json(text)
