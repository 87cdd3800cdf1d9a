"""One pipeline stage on live tensors: its forward pass, and its backward pass, either whole or
split into the gradients of inputs and of weights.

Not for the schedule or for sends between ranks: see driver.py.
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
from steelyard.run.fast_bindings import OutputBuffer

Values = dict[str, Any]


class LiveStage:
    """Runs one stage; each call is for one micro-batch.

    ``live`` are the model's tensors of this stage, by name. Collectives within the stage use
    ``channels``. Values for the next stage may be written into ``forward_buffers``, values for the
    previous one into ``backward_buffers``.

    ``values`` is the state of a micro-batch on this stage: its batch inputs, received values,
    values to send, and activations saved for backward.
    """

    def __init__(
        self,
        stage: PipelineStage,
        *,
        live: Mapping[str, Any],
        channels: Mapping[str, Channel] = MappingProxyType({}),
        forward_buffers: Mapping[str, OutputBuffer] = MappingProxyType({}),
        backward_buffers: Mapping[str, OutputBuffer] = MappingProxyType({}),
    ) -> None:
        self.stage = stage
        self.live = {name: live[name] for name in stage.held} | {
            name: value for name, value in live.items() if not name.startswith(_MODEL_PREFIXES)
        }
        self._forward = self._compile(stage.forward, channels, forward_buffers, kept=stage.kept)
        self._backward = self._compile(stage.backward, channels, backward_buffers)
        self._to_inputs = self._compile(
            stage.back_to_inputs, channels, backward_buffers, kept=stage.kept_between
        )
        self._to_weights = self._compile(stage.back_to_weights, channels)

    def _compile(
        self,
        graph: Graph,
        channels: Mapping[str, Channel],
        output_buffers: Mapping[str, OutputBuffer] = MappingProxyType({}),
        *,
        kept: Collection[str] = (),
    ) -> "_StagePart":
        makers = written_in_place(graph, [*output_buffers], kept=kept)
        by_node = {maker: output_buffers[value] for value, maker in makers.items()}
        return _StagePart(graph, self.live, channels, by_node)

    def begin(self) -> None:
        """Start a step."""
        for part in (self._forward, self._backward, self._to_inputs, self._to_weights):
            for carrier in part.carriers:
                carrier.begin()

    def forward(self, values: Values) -> torch.Tensor | None:
        """Run the forward pass; return the loss if this stage computes it."""
        loss: torch.Tensor | None = self._forward(values)
        return loss

    def backward(self, values: Values) -> None:
        self._backward(values)

    def back_to_inputs(self, values: Values) -> None:
        self._to_inputs(values)

    def back_to_weights(self, values: Values) -> None:
        self._to_weights(values)


_MODEL_PREFIXES = ("parameter:", "buffer:")


class _StagePart:
    def __init__(
        self,
        graph: Graph,
        live: Mapping[str, Any],
        channels: Mapping[str, Channel],
        output_buffers: Mapping[str, OutputBuffer],
    ) -> None:
        program = Program.plain(graph)
        emitted = emit(program, channels=channels, output_buffers=output_buffers)
        self._run, self._inputs, self._live = emitted.run, emitted.inputs, live
        self.carriers = emitted.carriers
        shared = _shared_storages(graph)
        sinks = [i.sink for i in program.instructions if i.sink is not None]
        # Sinks for model tensors are fixed; values that are passed on go into the micro-batch's
        # state.
        self._sinks = [
            sink.target
            if sink.kind is OutputKind.CARRIED
            else _sink(
                sink,
                live[sink.target],
                is_shared=not shared.isdisjoint(graph.storages_of(sink.node)),
            )
            for sink in sinks
        ]

    def __call__(self, values: Values) -> Any:
        live = self._live
        inputs: list[Any] = [live[n] if n in live else values.get(n) for n in self._inputs]
        sinks = [partial(setitem, values, s) if isinstance(s, str) else s for s in self._sinks]
        with torch.no_grad(), _torch.below_autograd():
            return self._run(inputs, sinks)


def _sink(sink: Output, target: Any, *, is_shared: bool) -> Callable[[torch.Tensor], Any]:
    if sink.kind is OutputKind.UPDATE:
        copy_into: Callable[[torch.Tensor], Any] = target.copy_
        return copy_into
    if is_shared:
        return lambda value: _add_gradient(target, value.clone())
    return partial(_add_gradient, target)


def _shared_storages(graph: Graph) -> frozenset[int]:
    """Return the storages that are still read later; gradients must not be accumulated in these."""
    read = {o.node for o in graph.outputs if o.kind is OutputKind.CARRIED}
    read |= {node.name for node in graph.inputs()}
    return frozenset(s for name in read for s in graph.storages_of(name))


def _add_gradient(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Accumulate as autograd does at a leaf: assign the first gradient, add later ones in place."""
    if parameter.grad is None:
        parameter.grad = value
    else:
        parameter.grad.add_(value)


def keep_only(values: Values, names: Iterable[str]) -> None:
    """Drop all values of the micro-batch except these."""
    kept = {name: values[name] for name in names}
    values.clear()
    values.update(kept)
