"""The random numbers of a step in stages: each draws what one device would have drawn there.

A rank draws again, and drops, what the others draw before it. Not for ranks that share a batch:
those draw apart, see randomness.py.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from steelyard.core.errors import BadInput
from steelyard.core.graph import Graph, Node, Output, OutputKind
from steelyard.core.program import Program
from steelyard.core.stages import Stages
from steelyard.run.emit import emit

# How much these draw hangs on shapes alone, so that it can be drawn again without the values.
_BY_SHAPE = frozenset({
    "aten.bernoulli.p", "aten.native_dropout.default", "aten.normal_functional.default",
    "aten.rand.default", "aten.rand_like.default", "aten.randint.default", "aten.randint.low",
    "aten.randn.default", "aten.randn_like.default", "aten.randperm.default",
    "aten.uniform.default",
})  # fmt: skip


class Draws:
    """``states(n)`` are the generator's before each stage of each of n micro-batches, in the order
    of one device; it is left as that device would leave it."""

    def __init__(self, stages: Stages) -> None:
        self._stages = [
            [_drawing(stages.graph, n) for n in stage.forward.nodes if n.is_random]
            for stage in stages.stages
        ]
        self.any = any(self._stages)

    def states(self, micro_batches: int) -> list[list[torch.Tensor]]:
        found: list[list[torch.Tensor]] = []
        for _ in range(micro_batches if self.any else 0):
            found.append([])
            for draws in self._stages:
                found[-1].append(torch.get_rng_state())
                for draw in draws:
                    draw()
        return found


def _drawing(graph: Graph, node: Node) -> Callable[[], object]:
    if node.op not in _BY_SHAPE or any(
        not t.dtype for i in node.inputs for t in graph.by_name[i].outputs
    ):
        raise BadInput(
            f"{node.op} in {node.path or 'the loss function'} draws random numbers, how many may "
            "hang on values",
            expected="dropout and the like, whose draws another rank can repeat by shape",
            remedy="leave this model whole: plan it without shard_pipeline",
        )
    given = [replace(graph.by_name[i], op="input", args=(), inputs=()) for i in node.inputs]
    alone = replace(
        graph,
        nodes=(*given, node),
        outputs=(Output(kind=OutputKind.LOSS, node=node.name),),
        counts=(),
    )
    run = emit(Program.plain(alone)).run
    shapes = [(t.shape, t.stride, getattr(torch, t.dtype)) for n in given for t in n.outputs]

    def draw() -> None:
        with torch.no_grad():
            run([_zeros(*shape) for shape in shapes], ())

    return draw


def _zeros(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype).zero_()
