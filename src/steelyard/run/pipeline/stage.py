"""One stage of a pipeline on its live tensors: forward, and backward whole or in two parts.

Not for who works when, nor for what goes between ranks: see driver.py.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from operator import setitem
from types import MappingProxyType
from typing import Any

import torch

from steelyard import _torch
from steelyard.comm.channel import Channel
from steelyard.ir.graph import Graph, Output, OutputKind
from steelyard.ir.pipeline_stages import PipelineStage
from steelyard.ir.program import Program
from steelyard.passes.pipeline.in_place_sends import written_in_place
from steelyard.run.codegen import emit
from steelyard.run.fast_bindings import Room

Values = dict[str, Any]


class LiveStage:
    """``live`` are the tensors that it holds, by name; each call is for one micro-batch. What its
    lines exchange goes over ``channels``; what it makes to be sent to the stage ``ahead`` of it, or
    ``back``, may lie in these rooms.

    ``values`` are what that micro-batch has come to: its part of the batch, what other stages have
    sent, and what this one has made for them and for its own backward pass.
    """

    def __init__(
        self,
        stage: PipelineStage,
        *,
        live: Mapping[str, Any],
        channels: Mapping[str, Channel] = MappingProxyType({}),
        ahead: Mapping[str, Room] = MappingProxyType({}),
        back: Mapping[str, Room] = MappingProxyType({}),
    ) -> None:
        self.stage = stage
        self.live = {name: live[name] for name in stage.held} | {
            name: value for name, value in live.items() if not name.startswith(_HELD)
        }
        self._forward = self._part(stage.forward, channels, ahead, kept=stage.kept)
        self._backward = self._part(stage.backward, channels, back)
        self._to_inputs = self._part(stage.back_to_inputs, channels, back, kept=stage.kept_between)
        self._to_weights = self._part(stage.back_to_weights, channels)

    def _part(
        self,
        graph: Graph,
        channels: Mapping[str, Channel],
        rooms: Mapping[str, Room] = MappingProxyType({}),
        *,
        kept: Collection[str] = (),
    ) -> "_StagePart":
        makers = written_in_place(graph, [*rooms], kept=kept)
        made = {maker: rooms[value] for value, maker in makers.items()}
        return _StagePart(graph, self.live, channels, made)

    def begin(self) -> None:
        """A step."""
        for part in (self._forward, self._backward, self._to_inputs, self._to_weights):
            for carrier in part.carriers:
                carrier.begin()

    def forward(self, values: Values) -> torch.Tensor | None:
        """The loss, if it is this stage that gives it."""
        loss: torch.Tensor | None = self._forward(values)
        return loss

    def backward(self, values: Values) -> None:
        self._backward(values)

    def back_to_inputs(self, values: Values) -> None:
        self._to_inputs(values)

    def back_to_weights(self, values: Values) -> None:
        self._to_weights(values)


_HELD = ("parameter:", "buffer:")


class _StagePart:
    def __init__(
        self,
        graph: Graph,
        live: Mapping[str, Any],
        channels: Mapping[str, Channel],
        rooms: Mapping[str, Room],
    ) -> None:
        program = Program.plain(graph)
        emitted = emit(program, channels=channels, rooms=rooms)
        self._run, self._inputs, self._live = emitted.run, emitted.inputs, live
        self.carriers = emitted.carriers
        lent = _lent(graph)
        sinks = [i.sink for i in program.instructions if i.sink is not None]
        # What goes into the model always goes the same way; the rest goes to the micro-batch.
        self._sinks = [
            sink.target
            if sink.kind is OutputKind.CARRIED
            else _into(
                sink, live[sink.target], is_lent=not lent.isdisjoint(graph.storages_of(sink.node))
            )
            for sink in sinks
        ]

    def __call__(self, values: Values) -> Any:
        live = self._live
        inputs: list[Any] = [live[n] if n in live else values.get(n) for n in self._inputs]
        sinks = [partial(setitem, values, s) if isinstance(s, str) else s for s in self._sinks]
        with torch.no_grad(), _torch.below_autograd():
            return self._run(inputs, sinks)


def _into(sink: Output, target: Any, *, is_lent: bool) -> Callable[[torch.Tensor], Any]:
    if sink.kind is OutputKind.UPDATE:
        copied: Callable[[torch.Tensor], Any] = target.copy_
        return copied
    if is_lent:
        return lambda value: _add_gradient(target, value.clone())
    return partial(_add_gradient, target)


def _lent(graph: Graph) -> frozenset[int]:
    """What others still read: no gradient may take it as its own and add to it."""
    read = {o.node for o in graph.outputs if o.kind is OutputKind.CARRIED}
    read |= {node.name for node in graph.inputs()}
    return frozenset(s for name in read for s in graph.storages_of(name))


def _add_gradient(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """As autograd does at a leaf: the first is taken, later ones are added in place."""
    if parameter.grad is None:
        parameter.grad = value
    else:
        parameter.grad.add_(value)


def keep_only(values: Values, names: Iterable[str]) -> None:
    """All else that the micro-batch has come to here is let go of."""
    kept = {name: values[name] for name in names}
    values.clear()
    values.update(kept)
