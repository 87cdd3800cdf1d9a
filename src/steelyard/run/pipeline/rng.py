"""The random numbers of a step in stages: each draws what one device would have drawn there.

A rank lets pass by what the others draw, when it comes to its own. Not for ranks that share a
batch: those draw apart, see run/rng_state.py.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from steelyard.comm.devices import CPU, generator_of
from steelyard.ir.graph import Graph, Node, Output, OutputKind
from steelyard.ir.pipeline_stages import PipelineStages
from steelyard.ir.program import Program
from steelyard.run.codegen import emit

Draw = Callable[[], object]
_Place = tuple[int, int]


class Draws:
    """Within ``at(m, s)`` the generator stands where one device begins with stage s of micro-batch
    m. The stages that draw themselves are one's ``own``; each comes once a step, one stage's
    micro-batches in their order."""

    def __init__(
        self, stages: PipelineStages, own: Collection[int], device: torch.device = CPU
    ) -> None:
        self._generator = generator_of(device)
        known: dict[str, Draw] = {}
        self._stages: list[list[Draw]] = []
        for stage in stages.stages:
            random = [node for node in stage.forward.nodes if node.is_random]
            for node in random:
                if node.signature not in known:
                    known[node.signature] = _passing(stages.graph, node, device)
            self._stages.append([known[node.signature] for node in random])
        self._own = own
        self._coming: Iterator[_Place] = iter(())
        self._passed: dict[_Place, torch.Tensor] = {}

    def begin(self, micro_batches: int) -> None:
        """The places of a step, in the order of one device."""
        count = micro_batches if any(self._stages) else 0
        self._coming = product(range(count), range(len(self._stages)))
        self._passed.clear()

    @contextlib.contextmanager
    def at(self, micro_batch: int, stage: int) -> Iterator[None]:
        place = micro_batch, stage
        if not self._stages[stage]:
            yield
        elif place in self._passed:
            further = self._generator.get_state()
            self._generator.set_state(self._passed.pop(place))
            yield
            self._generator.set_state(further)
        else:
            self._pass_by(until=place)
            yield

    def end(self) -> None:
        """To where one device would leave it."""
        self._pass_by(until=None)

    def _pass_by(self, *, until: _Place | None) -> None:
        for place in self._coming:
            if place == until:
                break
            draws = self._stages[place[1]]
            if draws and place[1] in self._own:
                self._passed[place] = self._generator.get_state()
            for draw in draws:
                draw()


def _drawing(graph: Graph, node: Node, device: torch.device = CPU) -> Draw:
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
            run([_zeros(*shape, device) for shape in shapes], ())

    return draw


def _zeros(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


def _passing(graph: Graph, node: Node, device: torch.device = CPU) -> Draw:
    """What leaves the generator where the node's own draw does. Where whole numbers take as much of
    it, they are drawn: in half the time, or, where a processor's library asks for one seed a call,
    in no time."""
    own = _drawing(graph, node, device)
    numel = max(tensor.numel for tensor in node.outputs)
    left = _left_by(own, device)
    for dtype, count in product((torch.int64, torch.int32), (1, numel)):
        others = partial(_whole_numbers, count, dtype, device)
        if _left_by(others, device) == left:
            return others
    return own


def _whole_numbers(count: int, dtype: torch.dtype, device: torch.device) -> None:
    """A few at a time: nobody has counted on room for them."""
    room = torch.empty(min(count, _AT_ONCE), dtype=dtype, device=device)
    for start in range(0, count, _AT_ONCE):
        room[: count - start].random_()


def _left_by(draw: Draw, device: torch.device = CPU) -> list[bytes]:
    """The states in which it leaves the generator: from a fresh one, and from one that has a normal
    number left over, of which it makes two."""
    found, generator = [], generator_of(device)
    before = generator.get_state()
    for drawn in (0, 1):
        generator.manual_seed(_SEED)
        torch.empty(drawn, device=device).normal_()
        draw()
        found.append(generator.get_state().numpy().tobytes())
    generator.set_state(before)
    return found


_AT_ONCE, _SEED = 1 << 16, 1


__all__ = ["Draws"]
