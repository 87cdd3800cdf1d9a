"""The random numbers of a step in stages: each draws what one device would have drawn there.

A rank draws again, and drops, what the others draw before it. Not for ranks that share a batch:
those draw apart, see randomness.py.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from steelyard.core.graph import Graph, Node, Output, OutputKind
from steelyard.core.program import Program
from steelyard.core.stages import Stages
from steelyard.run.emit import emit


class Draws:
    """``states(n, own)`` are the generator's before each of one's own stages of each of n
    micro-batches, in the order of one device; it is left as that device would leave it."""

    def __init__(self, stages: Stages) -> None:
        self._stages = [
            [_drawing(stages.graph, n) for n in stage.forward.nodes if n.is_random]
            for stage in stages.stages
        ]
        self.any = any(self._stages)

    def states(self, micro_batches: int, own: Collection[int]) -> list[dict[int, torch.Tensor]]:
        found: list[dict[int, torch.Tensor]] = []
        for _ in range(micro_batches if self.any else 0):
            found.append({})
            for index, draws in enumerate(self._stages):
                if index in own:
                    found[-1][index] = torch.get_rng_state()
                for draw in draws:
                    draw()
        return found


def _drawing(graph: Graph, node: Node) -> Callable[[], object]:
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
