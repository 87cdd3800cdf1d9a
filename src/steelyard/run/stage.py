"""One stage of a pipeline on its live tensors: forward, and backward whole or in two parts.

Not for who works when, nor for what goes between ranks: see pipeline.py.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import setitem
from types import MappingProxyType
from typing import Any

import torch

from steelyard import _torch
from steelyard.core.graph import Graph, Output, OutputKind
from steelyard.core.program import Program
from steelyard.core.stages import Stage
from steelyard.exchange.channel import Channel
from steelyard.run.emit import emit

Values = dict[str, Any]


class LiveStage:
    """``live`` are the tensors that it holds, by name; each call is for one micro-batch. What its
    lines exchange goes over ``channels``.

    ``values`` are what that micro-batch has come to: its part of the batch, what other stages have
    sent, and what this one has made for them and for its own backward pass.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        live: Mapping[str, Any],
        channels: Mapping[str, Channel] = MappingProxyType({}),
    ) -> None:
        self.stage = stage
        self.live = {name: live[name] for name in stage.held} | {
            name: value for name, value in live.items() if not name.startswith(_HELD)
        }
        self.busy_seconds = 0.0
        self._forward = _Part(stage.forward, self.live, channels)
        self._backward = _Part(stage.backward, self.live, channels)
        self._to_inputs = _Part(stage.back_to_inputs, self.live, channels)
        self._to_weights = _Part(stage.back_to_weights, self.live, channels)

    def forward(self, values: Values) -> torch.Tensor | None:
        """The loss, if it is this stage that gives it."""
        loss: torch.Tensor | None = self._timed(self._forward, values)
        return loss

    def backward(self, values: Values) -> None:
        self._timed(self._backward, values)

    def back_to_inputs(self, values: Values) -> None:
        self._timed(self._to_inputs, values)

    def back_to_weights(self, values: Values) -> None:
        self._timed(self._to_weights, values)

    def _timed(self, part: "_Part", values: Values) -> Any:
        begin = time.perf_counter()
        result = part(values)
        self.busy_seconds += time.perf_counter() - begin
        return result


_HELD = ("parameter:", "buffer:")


class _Part:
    def __init__(
        self, graph: Graph, live: Mapping[str, Any], channels: Mapping[str, Channel]
    ) -> None:
        program = Program.plain(graph)
        emitted = emit(program, channels=channels)
        self._run, self._inputs, self._live = emitted.run, emitted.inputs, live
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
