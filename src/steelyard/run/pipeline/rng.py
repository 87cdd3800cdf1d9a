"""The random numbers of a pipelined step: every stage draws what a single device would draw.

Before its own draws, a rank skips those of the other ranks. Not for ranks that share a batch, which
draw different numbers: see run/rng_state.py.
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
    """Sets the random generator to the right position for every stage and micro-batch.

    Within ``at(m, s)`` the generator has the state that a single device has when it begins stage
    s of micro-batch m. ``own`` are the stages of this rank; each runs once per micro-batch and
    step, with the micro-batches of a stage in order.
    """

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
                    known[node.signature] = _skip_call(stages.graph, node, device)
            self._stages.append([known[node.signature] for node in random])
        self._own = own
        self._remaining: Iterator[_Place] = iter(())
        self._saved_states: dict[_Place, torch.Tensor] = {}

    def begin(self, micro_batches: int) -> None:
        """Start a step, with its stages in the order of a single device."""
        count = micro_batches if any(self._stages) else 0
        self._remaining = product(range(count), range(len(self._stages)))
        self._saved_states.clear()

    @contextlib.contextmanager
    def at(self, micro_batch: int, stage: int) -> Iterator[None]:
        place = micro_batch, stage
        if not self._stages[stage]:
            yield
        elif place in self._saved_states:
            advanced = self._generator.get_state()
            self._generator.set_state(self._saved_states.pop(place))
            yield
            self._generator.set_state(advanced)
        else:
            self._skip_to(until=place)
            yield

    def end(self) -> None:
        """Leave the generator in the state of a single device after the step."""
        self._skip_to(until=None)

    def _skip_to(self, *, until: _Place | None) -> None:
        for place in self._remaining:
            if place == until:
                break
            draws = self._stages[place[1]]
            if draws and place[1] in self._own:
                self._saved_states[place] = self._generator.get_state()
            for draw in draws:
                draw()


def _draw_call(graph: Graph, node: Node, device: torch.device = CPU) -> Draw:
    inputs = [replace(graph.by_name[i], op="input", args=(), inputs=()) for i in node.inputs]
    single = replace(
        graph,
        nodes=(*inputs, node),
        outputs=(Output(kind=OutputKind.LOSS, node=node.name),),
        counts=(),
    )
    run = emit(Program.plain(single)).run
    shapes = [(t.shape, t.stride, getattr(torch, t.dtype)) for n in inputs for t in n.outputs]

    def draw() -> None:
        with torch.no_grad():
            run([_zeros(*shape, device) for shape in shapes], ())

    return draw


def _zeros(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


def _skip_call(graph: Graph, node: Node, device: torch.device = CPU) -> Draw:
    """Return a call that advances the generator exactly as the node's own draw does.

    Drawing integers is preferred if it advances the generator in the same way. It takes half the
    time, or almost none if a CPU library draws only one seed per call.
    """
    own = _draw_call(graph, node, device)
    numel = max(tensor.numel for tensor in node.outputs)
    target = _final_states(own, device)
    for dtype, count in product((torch.int64, torch.int32), (1, numel)):
        integers = partial(_draw_integers, count, dtype, device)
        if _final_states(integers, device) == target:
            return integers
    return own


def _draw_integers(count: int, dtype: torch.dtype, device: torch.device) -> None:
    """Draw integers in small batches, because the plan reserves no memory for them."""
    buffer = torch.empty(min(count, _CHUNK), dtype=dtype, device=device)
    for start in range(0, count, _CHUNK):
        buffer[: count - start].random_()


def _final_states(draw: Draw, device: torch.device = CPU) -> list[bytes]:
    """Return the generator's states after the draw: once from a fresh state, and once from one with
    a cached normal number (these are made in pairs).
    """
    found, generator = [], generator_of(device)
    before = generator.get_state()
    for count in (0, 1):
        generator.manual_seed(_SEED)
        torch.empty(count, device=device).normal_()
        draw()
        found.append(generator.get_state().numpy().tobytes())
    generator.set_state(before)
    return found


_CHUNK, _SEED = 1 << 16, 1


__all__ = ["Draws"]
