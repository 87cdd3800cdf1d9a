"""Derives the graph of a step with another number of samples from a captured one.

Each operator is called again on fake tensors with fewer samples; equal calls are made once. The
samples are tracked through each tensor, and sizes among the arguments follow them. If something
does not fit, nothing is derived, and the caller captures the step again. Not for running the step:
the model's code may depend on the number of samples, so a step that is run is captured.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from steelyard import _torch
from steelyard.capture.tracing.fake_execution import call_on_fakes
from steelyard.capture.tracing.to_ir import (
    adjusted_storage,
    covered_elements,
    layout,
    signature_of_call,
    work_of_call,
)
from steelyard.ir.graph import Argument, Graph, Node, OutputKind, Ref, Role, Tensor
from steelyard.operators import live, operator_named

_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_EXPAND, _REPEAT = "aten.expand.default", "aten.repeat.default"
# The position of the sizes among the arguments of operators that make a tensor of this shape.
_CREATIONS = {
    "aten.full.default": 0,
    "aten.zeros.default": 0,
    "aten.ones.default": 0,
    "aten.empty.memory_format": 0,
    "aten.rand.default": 0,
    "aten.randn.default": 0,
    "aten.new_zeros.default": 1,
    "aten.new_ones.default": 1,
    "aten.new_empty.default": 1,
    "aten.new_full.default": 1,
}
_SELECT_BACKWARD, _SLICE_BACKWARD = "aten.select_backward.default", "aten.slice_backward.default"
_SLICE = "aten.slice.Tensor"
_AS_STRIDED = ("aten.as_strided.default", "aten.as_strided_scatter.default")
# The position of the end among the arguments.
_ARANGES = {"aten.arange.default": 0, "aten.arange.start": 1, "aten.arange.start_step": 1}
# The position of the number of samples among the arguments.
_COUNTS = {"aten.native_group_norm.default": 3, "aten.native_group_norm_backward.default": 5}
_DIVISIONS = ("aten.div.Scalar", "aten.div.Tensor")


def with_samples(graph: Graph, *, before: int, after: int, device: torch.device) -> Graph | None:
    """Return the graph for ``after`` instead of ``before`` samples; None if it cannot be derived.

    A single sample is not derived, because operators treat dims of size 1 differently.
    """
    if min(before, after) < 2:
        return None
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    for guess in _GUESSES:
        with mode, torch.no_grad(), _torch.quiet_logs():
            try:
                return _Derivation(graph, before, after, device, guess).derived()
            except Exception:  # noqa: BLE001 - operators, also a user's, may raise anything here
                # Shapes do not fit: after a wrong guess, or because the model depends on its number
                # of samples.
                continue
    return None


def are_equal(derived: Graph, captured: Graph) -> bool:
    """True if a derived graph equals the captured one in every node, size and alias."""

    def parts(graph: Graph) -> tuple[Any, ...]:
        return graph.nodes, graph.storages, graph.outputs, graph.unused, graph.runs

    return parts(derived) == parts(captured)


class _Uncertain(Exception):
    """A size cannot be derived."""


@dataclass(frozen=True, slots=True)
class _Guess:
    """A guess about sizes that no input determines, if they equal the number of samples.

    Samples are in the first dim only, or in any. An arange may number the samples.
    """

    is_first: bool
    is_numbered: bool


_GUESSES = tuple(
    _Guess(is_first, is_numbered) for is_first in (True, False) for is_numbered in (True, False)
)


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor before and after, and the dims in which it holds samples.

    A dim comes with the number of elements of a sample within it: 1 for (samples, words), the
    number of words for (samples * words).
    """

    old: Tensor
    new: Tensor
    dims: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        new = self.new
        return self.old.shape, new.shape, new.stride, new.dtype, new.pending, self.dims


@dataclass(frozen=True, slots=True, kw_only=True)
class _FakeCall:
    """An operator's call with fewer samples: its arguments, results and costs.

    ``results`` are the results as torch tensors, ``storages`` the bytes of the storage of each.
    ``places`` maps the position of a result in the returned tuple to its number among the tensors.
    """

    args: tuple[Argument, ...]
    results: tuple[torch.Tensor, ...]
    storages: tuple[int, ...]
    dims: tuple[tuple[tuple[int, int], ...], ...]
    places: Mapping[int, int]
    signature: str
    work: Mapping[str, Any]


class _Derivation:
    def __init__(
        self, graph: Graph, before: int, after: int, device: torch.device, guess: _Guess
    ) -> None:
        self._graph, self._before, self._after = graph, before, after
        self._device, self._guess = device, guess
        self._values: dict[str, tuple[_Value, ...]] = {}
        self._places: dict[str, Mapping[int, int]] = {}
        self._calls: dict[Any, _FakeCall] = {}
        self._storages = list(graph.storages)
        self._sized: set[int] = set()

    def derived(self) -> Graph:
        nodes = tuple(self._node(node) for node in self._graph.nodes)
        for output in self._graph.outputs:
            if output.kind is not OutputKind.UPDATE and self._values[output.node][0].dims:
                raise _Uncertain  # a gradient has the shape of its parameter
        return replace(self._graph, nodes=nodes, storages=tuple(self._storages))

    def _node(self, node: Node) -> Node:
        if node.is_input:
            return self._input(node)
        if node.is_getitem:
            return self._item(node)
        inputs = [value for name in node.inputs for value in self._values[name]]
        if not self._is_guessed(node) and not any(value.dims for value in inputs):
            self._values[node.name] = tuple(_Value(t, t) for t in node.outputs)
            self._sized.update(t.storage for t in node.outputs)
            return node
        call = self._call(node)
        outputs = [
            self._placed(tensor, result, nbytes, inputs)
            for tensor, result, nbytes in zip(
                node.outputs, call.results, call.storages, strict=True
            )
        ]
        self._values[node.name] = tuple(map(_Value, node.outputs, outputs, call.dims))
        self._places[node.name] = call.places
        read = sum(v.new.nbytes - v.old.nbytes for v in inputs)
        made = sum(t.nbytes for t in outputs) - sum(t.nbytes for t in node.outputs)
        return replace(
            node,
            args=call.args,
            outputs=tuple(outputs),
            signature=call.signature,
            moved_bytes=node.moved_bytes + read + made if node.moved_bytes else 0,
            **call.work,
        )

    def _input(self, node: Node) -> Node:
        tensors = node.outputs
        if any(self._storages[t.storage].role is Role.BATCH for t in tensors):
            (old,) = tensors
            if old.shape[:1] != (self._before,):
                raise _Uncertain
            new = replace(old, shape=(self._after, *old.shape[1:]))
            item = new.nbytes // max(new.numel, 1)
            nbytes = covered_elements(new.shape, new.stride) * item
            self._resize(new.storage, min(self._storages[new.storage].nbytes, nbytes))
            self._values[node.name] = (_Value(old, new, ((0, 1),)),)
            return replace(node, outputs=(new,))
        self._values[node.name] = tuple(_Value(t, t) for t in tensors)
        return node

    def _item(self, node: Node) -> Node:
        source = node.inputs[0]
        if source not in self._places:
            self._values[node.name] = tuple(_Value(t, t) for t in node.outputs)
            return node
        (old,) = node.outputs
        value = self._values[source][self._places[source][int(str(node.args[1]))]]
        new = replace(value.new, storage=old.storage)
        self._values[node.name] = (_Value(old, new, value.dims),)
        return replace(node, outputs=(new,))

    def _is_guessed(self, node: Node) -> bool:
        """True if a size of the result may be the number of samples, although no input says so."""
        return node.op in (_EXPAND, _REPEAT, *_CREATIONS, *_ARANGES)

    def _resize(self, storage: int, nbytes: int) -> None:
        if storage not in self._sized:
            self._sized.add(storage)
            self._storages[storage] = replace(self._storages[storage], nbytes=nbytes)

    def _placed(
        self, old: Tensor, result: torch.Tensor, nbytes: int, inputs: Sequence[_Value]
    ) -> Tensor:
        """Return a result as a tensor in the storage of the old one."""
        offset = int(result.storage_offset())
        source = next((v.new for v in inputs if v.new.storage == old.storage), None)
        if source is None:
            self._resize(old.storage, nbytes)
        else:
            offset += source.offset
        return replace(
            old,
            shape=tuple(int(size) for size in result.shape),
            stride=tuple(int(step) for step in result.stride()),
            offset=offset,
        )

    def _call(self, node: Node) -> _FakeCall:
        names = list(dict.fromkeys(_refs((node.args, tuple(a for _, a in node.kwargs)))))
        if any(len(self._values[name]) != 1 for name in names):
            raise _Uncertain
        values = {name: self._values[name][0] for name in names}
        positions = {name: str(position) for position, name in enumerate(names)}
        node = node.reading(positions)
        # As text, because 0, 0.0 and False are equal.
        plain = repr((node.op, node.args, node.kwargs))
        shapes = tuple(t.shape for t in node.outputs)
        key = plain, shapes, tuple(value.key for value in values.values())
        if key not in self._calls:
            by_position = {positions[name]: value for name, value in values.items()}
            self._calls[key] = self._made(node, by_position)
        call = self._calls[key]
        names_by_position = {position: name for name, position in positions.items()}
        return replace(call, args=replace(node, args=call.args).reading(names_by_position).args)

    def _made(self, node: Node, values: Mapping[str, _Value]) -> _FakeCall:
        """Call the operator on fake tensors; its inputs are named by their positions."""
        if any(value.new.pending for value in values.values()):
            raise _Uncertain
        args = self._with_sizes(node, values)
        fakes = {name: self._fake(value.new) for name, value in values.items()}
        target: Any = operator_named(node.op)
        live_args = [live(a, fakes) for a in args]
        live_kwargs = {key: live(a, fakes) for key, a in node.kwargs}
        result = call_on_fakes(target, live_args, live_kwargs)
        results = [x for x in _torch.tree_leaves(result) if isinstance(x, torch.Tensor)]
        if len(results) != len(node.outputs):
            raise _Uncertain
        storages = [int(x.untyped_storage().nbytes()) for x in results]
        adjusted = adjusted_storage(target, results, list(fakes.values()))
        if adjusted is not None:
            storages[adjusted[0]] = adjusted[1]
        names = {id(fake): name for name, fake in fakes.items()}
        return _FakeCall(
            args=args,
            results=tuple(results),
            storages=tuple(storages),
            dims=tuple(self._dims(node, t, x, values) for t, x in zip(node.outputs, results)),
            places=_places(result),
            signature=signature_of_call(
                target, live_args, live_kwargs, layout_of=layout, name_of=lambda x: names[id(x)]
            ),
            work=work_of_call(target, live_args, live_kwargs, result),
        )

    def _fake(self, tensor: Tensor) -> torch.Tensor:
        return torch.empty_strided(
            tensor.shape,
            tensor.stride,
            dtype=getattr(torch, tensor.dtype),
            device=self._device,
        )

    # --- sizes among the arguments

    def _scaled(self, size: int) -> int:
        return size // self._before * self._after

    def _with_sizes(self, node: Node, values: Mapping[str, _Value]) -> tuple[Argument, ...]:
        """Return the arguments with sizes for fewer samples."""
        args: Any = node.args
        if node.op in _CREATIONS:
            at = _CREATIONS[node.op]
            sizes = tuple(self._guessed(i, size) for i, size in enumerate(args[at]))
            if at and args[at] == values[args[0].name].old.shape:
                sizes = values[args[0].name].new.shape
            return (*args[:at], sizes, *args[at + 1 :])
        if node.op in _ARANGES:
            at = _ARANGES[node.op]
            if args[at] == self._before and self._guess.is_numbered:
                return (*args[:at], self._after, *args[at + 1 :])
        if not args or not isinstance(args[0], Ref):
            return node.args
        value = values[args[0].name]
        if node.op in _VIEWS:
            return (args[0], self._viewed(node, value, args[1]))
        if node.op in _AS_STRIDED:
            return self._restrided(node, value)
        if node.op == _EXPAND:
            return (args[0], self._expanded(value, args[1]), *args[2:])
        if node.op == _REPEAT and not value.dims:
            return (args[0], tuple(self._guessed(i, count) for i, count in enumerate(args[1])))
        if node.op in (_SELECT_BACKWARD, _SLICE_BACKWARD):
            return (args[0], self._input_sizes(node, value), *args[2:])
        if node.op == _SLICE and len(args) > 3:
            return (*args[:3], self._end_of_slice(value, *args[1:4]), *args[4:])
        if node.op in _COUNTS and value.dims:
            at = _COUNTS[node.op]
            return (*args[:at], self._scaled(args[at]), *args[at + 1 :])
        if node.op in _DIVISIONS and args[1] == node.outputs[0].numel and value.dims:
            return (args[0], self._scaled(args[1]), *args[2:])  # the gradient of a mean
        return node.args

    def _viewed(self, node: Node, value: _Value, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of a view: samples stay where they are in memory."""
        new = list(sizes)
        for dim, inner in value.dims:
            place = self._place(value.old.shape, dim, inner, node.outputs[0].shape)
            if new[place] != -1:
                new[place] = self._scaled(new[place])
        return tuple(new)

    def _place(self, shape: Sequence[int], dim: int, inner: int, viewed: Sequence[int]) -> int:
        """Return the dim of a view that holds the samples of ``dim``."""
        step = prod(shape[dim + 1 :]) * inner
        above = prod(shape)
        for place, size in enumerate(viewed):
            below = above // size if size else 0
            if below <= step and step * self._before <= above:
                return place
            above = below
        raise _Uncertain

    def _expanded(self, value: _Value, sizes: Sequence[int]) -> tuple[int, ...]:
        new, dims = list(sizes), dict(value.dims)
        missing = len(sizes) - len(value.old.shape)
        for place, size in enumerate(sizes):
            dim = place - missing
            if dim in dims and size != -1:
                new[place] = self._scaled(size)
            elif size > 0 and (dim < 0 or value.old.shape[dim] == 1):
                new[place] = self._guessed(place, size, is_scalar=not value.old.shape)
        return tuple(new)

    def _restrided(self, node: Node, value: _Value) -> tuple[Argument, ...]:
        """Return the sizes and strides of a view that only changes strides of dims of size 1."""
        args: Any = node.args
        (old, new), strides = (value.old.shape, value.new.shape), args[2:3]
        is_outermost = value.dims == ((0, 1),) and all(
            step <= strides[0][0] for step in strides[0][1:]
        )
        if node.op != _AS_STRIDED[0] or args[1] != old or len(args) > 3 or not is_outermost:
            raise _Uncertain
        return (args[0], new, *strides)

    def _guessed(self, place: int, size: int, *, is_scalar: bool = False) -> int:
        """Return a size that no input determines.

        A scalar that is expanded is the gradient of a mean or a sum, perhaps over samples * words.
        """
        if place > 0 and self._guess.is_first:
            return size
        is_samples = size == self._before or (is_scalar and place == 0 and size % self._before == 0)
        return self._scaled(size) if is_samples else size

    def _input_sizes(self, node: Node, gradient: _Value) -> tuple[int, ...]:
        """Return the sizes of the tensor of which a part has this gradient."""
        args: Any = node.args
        sizes, dims = list(args[1]), dict(gradient.dims)
        cut, is_select = args[2] % len(sizes), node.op == _SELECT_BACKWARD
        for place in range(len(sizes)):
            if place != cut and place - (is_select and place > cut) in dims:
                sizes[place] = self._scaled(sizes[place])
        return tuple(sizes)

    def _end_of_slice(self, value: _Value, dim: int, start: Any, end: Any) -> Any:
        dim %= len(value.old.shape)
        size = value.old.shape[dim]
        if dim not in dict(value.dims):
            return end
        if start not in (0, None) or end < size:
            raise _Uncertain  # a part of the samples
        return self._scaled(end) if end == size else end

    # --- samples in the results

    def _dims(
        self, node: Node, old: Tensor, new: torch.Tensor, values: Mapping[str, _Value]
    ) -> tuple[tuple[int, int], ...]:
        if len(old.shape) != new.dim() or old.dtype != str(new.dtype).removeprefix("torch."):
            raise _Uncertain
        found = []
        for dim, (size, resized) in enumerate(zip(old.shape, new.shape, strict=True)):
            if size == resized:
                continue
            if size % self._before or self._scaled(size) != resized:
                raise _Uncertain
            found.append((dim, self._inner(node, old, dim, values)))
        return tuple(found)

    def _inner(self, node: Node, old: Tensor, dim: int, values: Mapping[str, _Value]) -> int:
        size = old.shape[dim]
        if size == self._before:
            return 1
        if node.op in _VIEWS:
            value = next(iter(values.values()))
            below = prod(old.shape[dim + 1 :])
            for from_dim, inner in value.dims:
                if self._place(value.old.shape, from_dim, inner, old.shape) == dim:
                    return prod(value.old.shape[from_dim + 1 :]) * inner // below
        inners = {
            inner
            for value in values.values()
            for at, inner in value.dims
            if value.old.shape[at] == size
        }
        if len(inners) > 1:
            raise _Uncertain
        # If no input determines the tensor, samples come first.
        return inners.pop() if inners else size // self._before


def _refs(argument: Any) -> Iterator[str]:
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for part in argument:
            yield from _refs(part)


def _places(result: Any) -> dict[int, int]:
    """Map the position of each tensor in a returned tuple to its number among the tensors."""
    if not isinstance(result, (tuple, list)):
        return {}
    is_tensor = [isinstance(x, torch.Tensor) for x in result]
    return {i: sum(is_tensor[:i]) for i, is_one in enumerate(is_tensor) if is_one}
