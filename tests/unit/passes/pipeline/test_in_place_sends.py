"""Values that are computed directly in the buffer from which they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from steelyard.ir.graph import Graph, Node, Output, OutputKind, Ref, Role, Storage, Tensor
from steelyard.passes.pipeline.in_place_sends import written_in_place


def node(name: str, op: str, storage: int, *reads: str, view: bool = False, **how: Any) -> Node:
    """Return a node that makes 24 numbers, or a part of them."""
    shape = how.get("shape", (4, 6))
    stride = how.get("stride", (shape[-1], 1)[-len(shape) :])
    made = Tensor(shape=shape, stride=stride, dtype=how.get("dtype", "float32"), storage=storage)
    args = tuple(map(Ref, reads))
    return Node(name=name, op=op, args=args, inputs=reads, outputs=(made,), is_view=view)


def written(*nodes: Node, sent: Sequence[str], kept: Sequence[str] = ()) -> dict[str, str]:
    """Return the values written in place in a part that begins with ``x``."""
    outputs = [Output(kind=OutputKind.CARRIED, node=n, target=n) for n in (*sent, *kept)]
    graph = Graph(
        nodes=(node("x", "input", 0), *nodes),
        storages=(Storage(nbytes=96, role=Role.ACTIVATION),) * 4,
        outputs=tuple(outputs),
        decomposition="of a test",
    )
    return written_in_place(graph, sent, kept=kept)


MADE = node("made", "aten.add.Tensor", 1, "x", "x")


VIEW = node("view", "aten.view.default", 1, "made", view=True, shape=(24,))


ROW = node("row", "aten.select.int", 1, "made", view=True, shape=(6,))


def test_a_sent_value_is_computed_in_its_send_buffer() -> None:
    assert written(MADE, sent=["made"]) == {"made": "made"}
    assert written(MADE, VIEW, sent=["view"]) == {"view": "made"}
    assert written(MADE, ROW, sent=["made"]) == {"made": "made"}, "read again before it is sent"


@pytest.mark.parametrize(
    ("nodes", "sent", "kept"),
    [
        ([MADE], ["made"], ["made"]),
        ([MADE, ROW], ["made"], ["row"]),
        ([MADE, VIEW], ["made", "view"], []),
        ([MADE, ROW], ["row"], []),
        ([], ["x"], []),
        ([node("view", "aten.view.default", 0, "x", view=True)], ["view"], []),
        ([node("made", "aten.relu.default", 1, "x")], ["made"], []),
        ([node("made", "aten.add.Tensor", 1, "x", stride=(1, 4))], ["made"], []),
        ([MADE, node("cut", "aten.view.dtype", 1, "made", view=True, dtype="int32")], ["cut"], []),
        ([MADE, node("again", "aten.add_.Tensor", 1, "made")], ["again"], []),
    ],
    ids=[
        "kept", "a part is kept", "sent twice", "a part alone", "came from elsewhere",
        "a view of what came", "its operator copies", "laid out otherwise", "of another type",
        "changed where it lies",
    ],
)  # fmt: skip
def test_other_values_are_copied_into_the_send_buffer(
    nodes: Sequence[Node], sent: Sequence[str], kept: list[str]
) -> None:
    assert written(*nodes, sent=sent, kept=kept) == {}


def test_values_of_another_part_are_ignored() -> None:
    assert written(MADE, sent=[]) == {}
    graph = Graph(nodes=(), storages=(), outputs=(), decomposition="of a test")
    assert written_in_place(graph, ["of another part"], kept=()) == {}
