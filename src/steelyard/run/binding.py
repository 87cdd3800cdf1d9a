"""Binds the named inputs of a program to live tensors: the model's once, the batch's every step.

Not for deciding whether the model is still the captured one: see model_guards.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.errors import Mismatch
from steelyard.ir.analysis.counted_means import counted_means
from steelyard.ir.gradient_codec import RESIDUAL
from steelyard.ir.graph import OutputKind, Tensor
from steelyard.ir.program import LOSS_SO_FAR, SO_FAR, Program
from steelyard.passes.data_parallel.all_reduce import SHARE
from steelyard.passes.offload.sliced_gradients import gradients_in_slices
from steelyard.run.codegen import Emitted
from steelyard.run.error_feedback import ErrorFeedback
from steelyard.run.target_counts import TargetCounter

Shapes = tuple[torch.Size | None, ...]
Sink = Callable[[torch.Tensor], object]


def live_tensors(model: nn.Module, constants: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return every parameter, buffer and constant of the model under its name in the graph."""
    return {
        **{f"parameter:{name}": p for name, p in model.named_parameters()},
        **{f"buffer:{name}": b for name, b in model.named_buffers()},
        **constants,
    }


class BatchLayout:
    """The captured form of a batch: structure, dtypes, devices and non-tensor values, but not
    shapes.

    Values under the ``unread`` keys, such as file names, are ignored.
    """

    def __init__(self, batch: Any, *, unread: frozenset[str] = frozenset()) -> None:
        self.unread = unread
        batch = self._drop_unread(batch)
        self.names = tuple(
            f"batch:{_torch.keystr(path)}" for path, _ in _torch.tree_flatten_with_path(batch)[0]
        )
        leaves, self._spec = _torch.tree_flatten(batch)
        self._kinds = [(x.dtype, x.device) if _is_tensor(x) else None for x in leaves]
        self._plain = [None if _is_tensor(x) else x for x in leaves]

    def leaves(self, batch: Any) -> list[Any]:
        """Return the batch's leaves in captured order; raise Mismatch if the batch has another
        form.
        """
        batch = self._drop_unread(batch)
        leaves, spec = _torch.tree_flatten(batch)
        if spec != self._spec:
            leaves = self._in_captured_order(batch, spec)
        for name, leaf, kind, plain in zip(self.names, leaves, self._kinds, self._plain):
            if kind is None:
                if leaf is not plain and not _same_value(leaf, plain):
                    raise _batch_mismatch(name, f"is {leaf!r}"[:80], f"{plain!r}"[:80])
            elif not isinstance(leaf, torch.Tensor):
                raise _batch_mismatch(name, f"is {leaf!r}"[:80], f"a tensor of {kind[0]}")
            elif (leaf.dtype, leaf.device) != kind:
                now = f"is {leaf.dtype} on {leaf.device}"
                raise _batch_mismatch(name, now, f"{kind[0]} on {kind[1]}")
            elif leaf.requires_grad:
                raise _batch_mismatch(name, "requires a gradient", "a batch without gradients")
        return leaves

    def _drop_unread(self, batch: Any) -> Any:
        if not self.unread or type(batch) is not dict:
            return batch
        return {key: None if key in self.unread else value for key, value in batch.items()}

    def _in_captured_order(self, batch: Any, spec: Any) -> list[Any]:
        """Return the leaves in the captured order; only the order of dict keys may differ."""
        found = {_torch.keystr(p): leaf for p, leaf in _torch.tree_flatten_with_path(batch)[0]}
        wanted = [name.removeprefix("batch:") for name in self.names]
        if sorted(found) != sorted(wanted) or not _equal_up_to_key_order(self._spec, spec):
            raise Mismatch(
                f"the batch has a different structure: {_first_names(found)}",
                expected=_first_names(wanted),
                remedy="give batches with the planned structure, or plan again",
            )
        return [found[name] for name in wanted]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchPart:
    """The input slot for one leaf of the batch. ``rows`` is the number of rows per unit, or None to
    pass the whole leaf.
    """

    leaf: int
    slot: int
    rows: int | None


class BoundProgram:
    """A program bound to its model's tensors; batch and tangent are filled in for every run.

    ``earlier`` runs all micro-batches but the last; often it is the same program.
    """

    def __init__(
        self,
        program: Program,
        emitted: Emitted,
        *,
        live: Mapping[str, Any],
        names: Sequence[str],
        shapes: Shapes,
        offload_sink: Callable[[nn.Parameter], Sink | None] = lambda _: None,
        residuals: ErrorFeedback | None = None,
    ) -> None:
        """Bind ``emitted``. ``offload_sink`` returns the sink of an offloaded gradient;
        ``residuals`` contains the error-feedback residuals of compressed gradients.
        """
        self.program = program
        self.repeats, self.parts = program.repeats, program.parts
        portions = program.layout.portions
        # The number of batch units in each micro-batch, over all ranks in rank order.
        self.sizes = tuple(size for size in portions for _ in range(program.repeats))
        self._units, self._size = program.units, program.share
        counted = counted_means(program.graph) if program.parts > 1 else ()
        self.counters = [TargetCounter(program.graph, mean) for mean in counted]
        self.run = emitted.run
        self.emitted = emitted
        nodes = {node.name: node for node in program.graph.inputs()}
        self._template: list[Any] = [None] * len(emitted.inputs)
        self._parts: list[_BatchPart] = []
        self._strides: list[tuple[str, int, Tensor]] = []
        self._tangent: int | None = None
        self._share: int | None = None
        self._loss_so_far: int | None = None
        # Slots of gradients that are accumulated over micro-batches before they are all-reduced.
        self._accumulated: dict[int, nn.Parameter] = {}
        for slot, name in enumerate(emitted.inputs):
            if name == "tangent":
                self._tangent = slot
            elif name == SHARE:
                self._share = slot
            elif name == LOSS_SO_FAR:
                self._loss_so_far = slot
            elif name.startswith(SO_FAR):
                self._accumulated[slot] = live[name.removeprefix(SO_FAR)]
            elif name.startswith(RESIDUAL):
                assert residuals is not None
                self._template[slot] = residuals.of(program.graph, nodes[name])
            elif name in live:
                self._template[slot] = _checked_tensor(name, live[name], nodes[name].outputs)
            # otherwise no node reads it: see BatchLayout
            elif nodes[name].outputs or name in names:
                leaf = _leaf_index(name, names)
                planned = nodes[name].outputs[0] if nodes[name].outputs else None
                rows = _rows_per_unit(name, planned, shapes[leaf], program)
                self._parts.append(_BatchPart(leaf=leaf, slot=slot, rows=rows))
                if planned is not None:
                    self._strides.append((name, leaf, planned))
        tangent = nodes.get("tangent")
        self.share = nodes[SHARE].outputs[0] if self._share is not None else None
        self.tangent = tangent.outputs[0] if tangent else None
        outputs = [i.sink for i in program.instructions if i.sink is not None]
        slots = {name: slot for slot, name in enumerate(emitted.inputs)}
        self._targets: list[tuple[OutputKind, Any, int | None]] = [
            (o.kind, live.get(o.target), slots.get(o.target)) for o in outputs
        ]
        self._sinks = [
            offload_sink(target) if kind is OutputKind.OFFLOADED_GRADIENT else _sink(kind, target)
            for kind, target, _ in self._targets
        ]
        self._writes_batch = None in self._sinks
        self.sliced_gradients = gradients_in_slices(program)
        # If data-parallel ranks drew the same random numbers for different samples, training
        # would see only a fraction of the intended noise.
        self.draws_per_rank = program.layout.data > 1 and any(
            n.is_random for n in program.graph.nodes
        )
        # True if the program returns the loss summed over all micro-batches so far.
        self.returns_total_loss = self._loss_so_far is not None
        self.earlier = self
        if emitted.earlier is not None:
            self.earlier = BoundProgram(
                program.earlier, emitted.earlier, live=live, names=names, shapes=shapes,
                offload_sink=offload_sink, residuals=residuals,
            )  # fmt: skip

    def check_strides(self, leaves: Sequence[Any]) -> None:
        """Raise Mismatch if a leaf of the batch has other strides than at capture."""
        for name, leaf, planned in self._strides:
            stride = leaves[leaf].stride()
            if stride != planned.stride and not _same_layout(leaves[leaf].shape, stride, planned):
                raise Mismatch(
                    f"{name} has strides {stride}",
                    expected=f"{planned.stride}, as the step was captured",
                    remedy="use the same memory layout for all batches, for example with "
                    ".contiguous() when collating",
                )

    def inputs(
        self,
        leaves: Sequence[Any],
        index: int,
        tangent: torch.Tensor,
        share: torch.Tensor | None = None,
        loss_so_far: torch.Tensor | None = None,
    ) -> list[Any]:
        """Return the program's inputs for micro-batch ``index`` of the global batch.

        ``share`` is the weight of this rank's loss if the program sums the losses of the ranks;
        ``loss_so_far`` is the summed loss of the earlier micro-batches.
        """
        inputs = self._inputs_at(leaves, sum(self.sizes[:index]), tangent, share)
        for slot, parameter in self._accumulated.items():
            inputs[slot] = parameter.grad
        if self._loss_so_far is not None:
            inputs[self._loss_so_far] = loss_so_far
        return inputs

    def counts(self, leaves: Sequence[Any]) -> list[list[int]]:
        """Return, for every mean in the loss, the number of counted targets in each micro-batch of
        all ranks.
        """
        # The program accepts only its own batch shape, so the last window may overlap the previous
        # one.
        no_tangent, found = torch.zeros((), device="cpu"), []
        starts = [*range(0, self._units - self._size, self._size), self._units - self._size]
        windows = [self._inputs_at(leaves, start, no_tangent, None) for start in starts]
        for counter in self.counters:
            units = [0] * self._units
            for start, inputs in zip(starts, windows, strict=True):
                units[start : start + self._size] = counter.count(inputs, units=self._size)
            unit_counts = iter(units)
            found.append([sum(islice(unit_counts, size)) for size in self.sizes])
        return found

    def _inputs_at(
        self, leaves: Sequence[Any], start: int, tangent: torch.Tensor, share: torch.Tensor | None
    ) -> list[Any]:
        """Return the program's inputs for the part of the batch that starts at unit ``start``."""
        inputs = self._template.copy()
        for part in self._parts:
            leaf, rows = leaves[part.leaf], part.rows
            inputs[part.slot] = (
                leaf if rows is None else leaf.narrow(0, start * rows, self._size * rows)
            )
        if self._tangent is not None:
            inputs[self._tangent] = tangent
        if self._share is not None:
            inputs[self._share] = share
        return inputs

    def detach_reduced_gradients(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Detach and return the gradients of earlier steps. These are already reduced and must not
        be reduced again, so the caller adds them after this step.
        """
        earlier_gradients = [(p, p.grad) for p in self._accumulated.values() if p.grad is not None]
        for parameter, _ in earlier_gradients:
            parameter.grad = None
        return earlier_gradients

    def restore_gradients(
        self, earlier_gradients: Sequence[tuple[nn.Parameter, torch.Tensor]]
    ) -> None:
        """Restore the detached gradients, and discard what this rank alone has accumulated
        since.
        """
        for parameter in self._accumulated.values():
            parameter.grad = None
        for parameter, gradient in earlier_gradients:
            parameter.grad = gradient

    def batch_inputs(
        self, leaves: Sequence[Any], index: int, tangent: torch.Tensor
    ) -> dict[str, Any]:
        """Return the batch inputs and the tangent of micro-batch ``index``, by name."""
        inputs = dict(zip(self.emitted.inputs, self.inputs(leaves, index, tangent)))
        return {n: v for n, v in inputs.items() if n.startswith(("batch:", "tangent"))}

    def sinks_for(
        self, inputs: Sequence[Any], deferred: list[tuple[torch.Tensor, torch.Tensor]] | None
    ) -> Sequence[Any]:
        """Return one sink per output; gradients of parameters with hooks are appended to
        ``deferred``."""
        if deferred is None and not self._writes_batch:
            return self._sinks
        sinks = list(self._sinks)
        for index, (kind, target, slot) in enumerate(self._targets):
            is_gradient = kind in (OutputKind.GRADIENT, OutputKind.OFFLOADED_GRADIENT)
            if is_gradient and deferred is not None and _torch.any_hooks([target]):
                sinks[index] = _defer(target, deferred)
            elif target is None:
                assert slot is not None
                sinks[index] = inputs[slot].copy_
        return sinks


class _Gradient:
    """A gradient sink that accumulates as autograd does at a leaf: it assigns the first gradient
    and adds later ones in place.
    """

    __slots__ = ("_parameter",)

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def __call__(self, value: torch.Tensor) -> None:
        before = self._parameter.grad
        if before is None:
            # A view keeps the storage alive, even after `_Sum` has moved the gradient to another
            # storage.
            self._parameter.grad = value.detach()
        else:
            before.add_(value)


class _Sum:
    """A sink that replaces the rank's own gradient with the sum over all ranks, in the same tensor
    object. Every reference to that tensor sees the sum, and the old storage is freed.
    """

    __slots__ = ("_parameter",)

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def __call__(self, value: torch.Tensor) -> None:
        own = self._parameter.grad
        assert own is not None
        own.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def _sink(kind: OutputKind, target: torch.Tensor | None) -> Sink | None:
    """Return None for a batch leaf that the model writes into: that tensor changes every step."""
    if target is None:
        return None
    if kind is OutputKind.SUMMED:
        return _Sum(target)
    return _Gradient(target) if kind is OutputKind.GRADIENT else target.copy_


def _defer(target: torch.Tensor, deferred: list[tuple[torch.Tensor, torch.Tensor]]) -> Sink:
    return lambda value: deferred.append((target, value))


def shapes_of(leaves: Sequence[Any]) -> Shapes:
    return tuple(leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves)


def check_trained(program: Program, model: nn.Module) -> None:
    """Raise Mismatch unless the program has a gradient for each trainable parameter, or lists the
    parameter as unused.
    """
    graph = program.graph
    planned = {
        o.target.partition(":")[2] for o in graph.outputs if o.kind is OutputKind.GRADIENT
    } | set(graph.unused)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if planned != trained:
        raise Mismatch(
            f"the model also trains {_first_names(trained - planned) or 'no others'}, but does not "
            f"train {_first_names(planned - trained) or 'none'}, compared with the plan",
            expected="the parameters that the step was captured with",
            remedy="plan again for this model",
        )


def _checked_tensor(name: str, tensor: Any, planned: tuple[Tensor, ...]) -> Any:
    if planned and isinstance(tensor, torch.Tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (tuple(tensor.shape), dtype) != (planned[0].shape, planned[0].dtype):
            raise Mismatch(
                f"{name.replace(':', ' ', 1)} is {dtype}{list(tensor.shape)}",
                expected=f"{planned[0].dtype}{list(planned[0].shape)}, as the step was captured",
                remedy="plan again for this model",
            )
    return tensor


def _leaf_index(name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise Mismatch(
            f"the program needs {name.replace(':', ' ', 1)}, which was not found",
            expected="the model and a batch as captured",
            remedy="plan again for this model and batch",
        )
    return names.index(name)


def _rows_per_unit(
    name: str, planned: Tensor | None, shape: torch.Size | None, program: Program
) -> int | None:
    """Return the number of rows of this leaf per unit, or None if every micro-batch gets the whole
    leaf.
    """
    if planned is None or shape is None or tuple(shape) == planned.shape:
        return None
    units, size = program.units, program.share
    if planned.shape and planned.shape[0] % size == 0:
        rows = planned.shape[0] // size
        if tuple(shape) == (units * rows, *planned.shape[1:]):
            return rows
    shares = f"{units} equal parts" if size == 1 else f"{size} of {units} equal parts"
    raise Mismatch(
        f"{name} has shape {list(shape)}",
        expected=f"{list(planned.shape)} in {'each of ' if size == 1 else ''}{shares}",
        remedy="plan again for this batch",
    )


def _same_layout(shape: torch.Size, stride: tuple[int, ...], planned: Tensor) -> bool:
    """True if the strides agree along all dimensions with more than one element; the others do
    not matter."""
    pairs = zip(shape, planned.shape, stride, planned.stride, strict=True)
    return 0 in shape or all(s == p for n, m, s, p in pairs if n > 1 and m > 1)


def _equal_up_to_key_order(planned: Any, actual: Any) -> bool:
    """True if two tree specs differ at most in the order of dict keys."""
    if planned.type is not actual.type or planned.num_children != actual.num_children:
        return False
    planned_children, actual_children = planned.children(), actual.children()
    if isinstance(planned.type, type) and issubclass(planned.type, dict):
        planned_children = sorted(
            zip(map(repr, _keys(planned)), planned_children), key=lambda pair: pair[0]
        )
        actual_children = sorted(
            zip(map(repr, _keys(actual)), actual_children), key=lambda pair: pair[0]
        )
        return all(
            k == j and _equal_up_to_key_order(a, b)
            for (k, a), (j, b) in zip(planned_children, actual_children)
        )
    if planned.context != actual.context:
        return False
    return all(
        _equal_up_to_key_order(a, b) for a, b in zip(planned_children, actual_children, strict=True)
    )


def _keys(spec: Any) -> list[Any]:
    # The context of a defaultdict consists of its factory and its keys.
    context = spec.context
    return list(context[1] if context and isinstance(context[-1], list) else context)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _same_value(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return bool(a.hex() == b.hex())
    return isinstance(a, (bool, int, complex, str, bytes, torch.dtype, torch.device)) and bool(
        a == b
    )


def _batch_mismatch(name: str, now: str, expected: str) -> Mismatch:
    return Mismatch(
        f"{name} {now}",
        expected=f"{expected}, as the step was captured",
        remedy="give batches with the planned structure, or plan again",
    )


def _first_names(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
