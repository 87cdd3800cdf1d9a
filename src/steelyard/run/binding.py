"""Tie a program's inputs, by name, to live tensors: the model's for good, the batch's each time.

Not for deciding whether the model is still the same: see model_guards.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.errors import Mismatch
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
    """Every tensor of the model under the name that a graph gives it."""
    return {
        **{f"parameter:{name}": p for name, p in model.named_parameters()},
        **{f"buffer:{name}": b for name, b in model.named_buffers()},
        **constants,
    }


class BatchLayout:
    """What a batch must look like: structure, dtypes, devices and plain values; shapes apart.

    What stands under a key that is ``unread``, such as the names of files, may be anything.
    """

    def __init__(self, batch: Any, *, unread: frozenset[str] = frozenset()) -> None:
        self.unread = unread
        batch = self._read_part(batch)
        self.names = tuple(
            f"batch:{_torch.keystr(path)}" for path, _ in _torch.tree_flatten_with_path(batch)[0]
        )
        leaves, self._spec = _torch.tree_flatten(batch)
        self._kinds = [(x.dtype, x.device) if _is_tensor(x) else None for x in leaves]
        self._plain = [None if _is_tensor(x) else x for x in leaves]

    def leaves(self, batch: Any) -> list[Any]:
        """The batch's leaves in planned order, or a Mismatch."""
        batch = self._read_part(batch)
        leaves, spec = _torch.tree_flatten(batch)
        if spec != self._spec:
            leaves = self._reordered(batch, spec)
        for name, leaf, kind, plain in zip(self.names, leaves, self._kinds, self._plain):
            if kind is None:
                if leaf is not plain and not _same_value(leaf, plain):
                    raise _other_batch(name, f"is {leaf!r}"[:80], f"{plain!r}"[:80])
            elif not isinstance(leaf, torch.Tensor):
                raise _other_batch(name, f"is {leaf!r}"[:80], f"a tensor of {kind[0]}")
            elif (leaf.dtype, leaf.device) != kind:
                now = f"is {leaf.dtype} on {leaf.device}"
                raise _other_batch(name, now, f"{kind[0]} on {kind[1]}")
            elif leaf.requires_grad:
                raise _other_batch(name, "requires a gradient", "a batch without gradients")
        return leaves

    def _read_part(self, batch: Any) -> Any:
        if not self.unread or type(batch) is not dict:
            return batch
        return {key: None if key in self.unread else value for key, value in batch.items()}

    def _reordered(self, batch: Any, spec: Any) -> list[Any]:
        """A dict with its keys in another order is the same batch; anything else is not."""
        found = {_torch.keystr(p): leaf for p, leaf in _torch.tree_flatten_with_path(batch)[0]}
        wanted = [name.removeprefix("batch:") for name in self.names]
        if sorted(found) != sorted(wanted) or not _same_but_for_order(self._spec, spec):
            raise Mismatch(
                f"the batch has another structure: {_list_of(found)}",
                expected=_list_of(wanted),
                remedy="give batches as the one that was planned with, or plan again",
            )
        return [found[name] for name in wanted]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchPart:
    """How one leaf of the batch reaches one input; ``rows`` are those of a unit of it."""

    leaf: int
    slot: int
    rows: int | None


class BoundProgram:
    """A program with its model's tensors in place; the batch and the tangent are filled in.

    ``earlier`` is what micro-batches before the last carry out, mostly the same.
    """

    def __init__(
        self,
        program: Program,
        emitted: Emitted,
        *,
        live: Mapping[str, Any],
        names: Sequence[str],
        shapes: Shapes,
        far_sink: Callable[[nn.Parameter], Sink | None] = lambda _: None,
        residuals: ErrorFeedback | None = None,
    ) -> None:
        """``far_sink`` says where a gradient goes that does not stay; ``residuals`` holds what
        codes of gradients have lost so far."""
        self.program = program
        self.repeats, self.parts = program.repeats, program.parts
        portions = program.layout.portions
        # Of each part of the batch, all ranks' in turn, how many of the batch's units it is.
        self.sizes = tuple(size for size in portions for _ in range(program.repeats))
        self._units, self._size = program.units, program.share
        counted = program.graph.counted if program.parts > 1 else ()
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
        # What of gradients is added up over micro-batches before ranks exchange it.
        self._so_far: dict[int, nn.Parameter] = {}
        for slot, name in enumerate(emitted.inputs):
            if name == "tangent":
                self._tangent = slot
            elif name == SHARE:
                self._share = slot
            elif name == LOSS_SO_FAR:
                self._loss_so_far = slot
            elif name.startswith(SO_FAR):
                self._so_far[slot] = live[name.removeprefix(SO_FAR)]
            elif name.startswith(RESIDUAL):
                assert residuals is not None
                self._template[slot] = residuals.of(program.graph, nodes[name])
            elif name in live:
                self._template[slot] = _fitting(name, live[name], nodes[name].outputs)
            elif nodes[name].outputs or name in names:  # else nothing reads it, see BatchLayout
                leaf = _leaf_of(name, names)
                planned = nodes[name].outputs[0] if nodes[name].outputs else None
                rows = _rows(name, planned, shapes[leaf], program)
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
            far_sink(target) if kind is OutputKind.FAR_GRADIENT else _sink(kind, target)
            for kind, target, _ in self._targets
        ]
        self._writes_batch = None in self._sinks
        self.made_in_slices = gradients_in_slices(program)
        # Ranks that drew the same numbers for other samples would train on half of the noise.
        self.draws_apart = program.layout.batch > 1 and any(
            n.is_random for n in program.graph.nodes
        )
        # Whether what it returns is the loss of all micro-batches.
        self.tells_all = self._loss_so_far is not None
        self.earlier = self
        if emitted.earlier is not None:
            self.earlier = BoundProgram(
                program.earlier, emitted.earlier, live=live, names=names, shapes=shapes,
                far_sink=far_sink, residuals=residuals,
            )  # fmt: skip

    def check_strides(self, leaves: Sequence[Any]) -> None:
        for name, leaf, planned in self._strides:
            stride = leaves[leaf].stride()
            if stride != planned.stride and not _same_layout(leaves[leaf].shape, stride, planned):
                raise Mismatch(
                    f"{name} has strides {stride}",
                    expected=f"{planned.stride}, as the step was captured",
                    remedy="lay batches out alike, for example by .contiguous() when collating",
                )

    def inputs(
        self,
        leaves: Sequence[Any],
        index: int,
        tangent: torch.Tensor,
        share: torch.Tensor | None = None,
        so_far: torch.Tensor | None = None,
    ) -> list[Any]:
        """What the program takes for part ``index`` of the global batch; ``share`` is what its
        loss weighs, where the program puts the losses of ranks together, and ``so_far`` what those
        of earlier micro-batches add up to."""
        inputs = self._inputs_at(leaves, sum(self.sizes[:index]), tangent, share)
        for slot, parameter in self._so_far.items():
            inputs[slot] = parameter.grad
        if self._loss_so_far is not None:
            inputs[self._loss_so_far] = so_far
        return inputs

    def counts(self, leaves: Sequence[Any]) -> list[list[int]]:
        """For each mean in the loss, how many targets it counts in each part, all ranks' alike."""
        # Its own shape is all that the program takes: the last stretch of it may overlap.
        nothing, found = torch.zeros((), device="cpu"), []
        starts = [*range(0, self._units - self._size, self._size), self._units - self._size]
        stretches = [self._inputs_at(leaves, start, nothing, None) for start in starts]
        for counter in self.counters:
            units = [0] * self._units
            for start, inputs in zip(starts, stretches, strict=True):
                units[start : start + self._size] = counter.count(inputs, units=self._size)
            each = iter(units)
            found.append([sum(islice(each, size)) for size in self.sizes])
        return found

    def _inputs_at(
        self, leaves: Sequence[Any], start: int, tangent: torch.Tensor, share: torch.Tensor | None
    ) -> list[Any]:
        """From unit ``start`` of the batch on."""
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

    def put_by(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """The gradients of earlier steps that ranks have summed up: for them to be added to, when
        those of this step are."""
        before = [(p, p.grad) for p in self._so_far.values() if p.grad is not None]
        for parameter, _ in before:
            parameter.grad = None
        return before

    def put_back(self, before: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """What was put by, and nothing that one rank alone has added up since."""
        for parameter in self._so_far.values():
            parameter.grad = None
        for parameter, gradient in before:
            parameter.grad = gradient

    def given(self, leaves: Sequence[Any], index: int, tangent: torch.Tensor) -> dict[str, Any]:
        """Of part ``index``, by name, what is not the model's."""
        inputs = dict(zip(self.emitted.inputs, self.inputs(leaves, index, tangent)))
        return {n: v for n, v in inputs.items() if n.startswith(("batch:", "tangent"))}

    def sinks_for(
        self, inputs: Sequence[Any], late: list[tuple[torch.Tensor, torch.Tensor]] | None
    ) -> Sequence[Any]:
        """Where each output goes; gradients of parameters with hooks are put off into ``late``."""
        if late is None and not self._writes_batch:
            return self._sinks
        sinks = list(self._sinks)
        for index, (kind, target, slot) in enumerate(self._targets):
            is_gradient = kind in (OutputKind.GRADIENT, OutputKind.FAR_GRADIENT)
            if is_gradient and late is not None and _torch.any_hooks([target]):
                sinks[index] = _put_off(target, late)
            elif target is None:
                assert slot is not None
                sinks[index] = inputs[slot].copy_
        return sinks


class _Gradient:
    """What autograd does at a leaf: the first gradient is taken, later ones are added in place."""

    __slots__ = ("_parameter",)

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def __call__(self, value: torch.Tensor) -> None:
        before = self._parameter.grad
        if before is None:
            # A view holds what it is a view of, also when `_Sum` has laid it on other memory.
            self._parameter.grad = value.detach()
        else:
            before.add_(value)


class _Sum:
    """What all ranks' gradients add up to, where this rank's own was. Whoever holds that tensor
    holds the sum, and what it lay on is free."""

    __slots__ = ("_parameter",)

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def __call__(self, value: torch.Tensor) -> None:
        held = self._parameter.grad
        assert held is not None
        held.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def _sink(kind: OutputKind, target: torch.Tensor | None) -> Sink | None:
    """None for a batch that the model writes into: it is another tensor each time."""
    if target is None:
        return None
    if kind is OutputKind.SUMMED:
        return _Sum(target)
    return _Gradient(target) if kind is OutputKind.GRADIENT else target.copy_


def _put_off(target: torch.Tensor, late: list[tuple[torch.Tensor, torch.Tensor]]) -> Sink:
    return lambda value: late.append((target, value))


def shapes_of(leaves: Sequence[Any]) -> Shapes:
    return tuple(leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves)


def check_trained(program: Program, model: nn.Module) -> None:
    """The program gives a gradient to each trainable parameter, or knows that it has none."""
    graph = program.graph
    planned = {
        o.target.partition(":")[2] for o in graph.outputs if o.kind is OutputKind.GRADIENT
    } | set(graph.unused)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if planned != trained:
        raise Mismatch(
            f"the model trains {_list_of(trained - planned) or 'no further parameter'} and not "
            f"{_list_of(planned - trained) or 'fewer'} than the plan",
            expected="the parameters that the step was captured with",
            remedy="plan again for this model",
        )


def _fitting(name: str, tensor: Any, planned: tuple[Tensor, ...]) -> Any:
    if planned and isinstance(tensor, torch.Tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (tuple(tensor.shape), dtype) != (planned[0].shape, planned[0].dtype):
            raise Mismatch(
                f"{name.replace(':', ' ', 1)} is {dtype}{list(tensor.shape)}",
                expected=f"{planned[0].dtype}{list(planned[0].shape)}, as the step was captured",
                remedy="plan again for this model",
            )
    return tensor


def _leaf_of(name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise Mismatch(
            f"the program needs {name.replace(':', ' ', 1)}, which is not there",
            expected="the model and a batch like the ones the program was captured with",
            remedy="plan again for this model and batch",
        )
    return names.index(name)


def _rows(
    name: str, planned: Tensor | None, shape: torch.Size | None, program: Program
) -> int | None:
    """How many rows of this leaf are a unit; None where each part takes the whole."""
    if planned is None or shape is None or tuple(shape) == planned.shape:
        return None
    units, size = program.units, program.share
    if planned.shape and planned.shape[0] % size == 0:
        rows = planned.shape[0] // size
        if tuple(shape) == (units * rows, *planned.shape[1:]):
            return rows
    shares = f"{units} equal parts" if size == 1 else f"as many as are {size} of {units} parts"
    raise Mismatch(
        f"{name} has shape {list(shape)}",
        expected=f"{list(planned.shape)} in {'each of ' if size == 1 else ''}{shares}",
        remedy="plan again for this batch",
    )


def _same_layout(shape: torch.Size, stride: tuple[int, ...], planned: Tensor) -> bool:
    """Strides count only along dimensions that have more than one element."""
    pairs = zip(shape, planned.shape, stride, planned.stride, strict=True)
    return 0 in shape or all(s == p for n, m, s, p in pairs if n > 1 and m > 1)


def _same_but_for_order(planned: Any, given: Any) -> bool:
    if planned.type is not given.type or planned.num_children != given.num_children:
        return False
    ours, theirs = planned.children(), given.children()
    if isinstance(planned.type, type) and issubclass(planned.type, dict):
        ours = sorted(zip(map(repr, _keys(planned)), ours), key=lambda pair: pair[0])
        theirs = sorted(zip(map(repr, _keys(given)), theirs), key=lambda pair: pair[0])
        return all(k == j and _same_but_for_order(a, b) for (k, a), (j, b) in zip(ours, theirs))
    if planned.context != given.context:
        return False
    return all(_same_but_for_order(a, b) for a, b in zip(ours, theirs, strict=True))


def _keys(spec: Any) -> list[Any]:
    # A defaultdict's context is its factory and then its keys.
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


def _other_batch(name: str, now: str, expected: str) -> Mismatch:
    return Mismatch(
        f"{name} {now}",
        expected=f"{expected}, as the step was captured",
        remedy="give batches as the one that was planned with, or plan again",
    )


def _list_of(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
