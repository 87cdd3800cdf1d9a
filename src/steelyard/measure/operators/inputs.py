"""Real arguments for one operator of a plain-data graph, as tensors with the node's layouts.

Not for calling the operator: see benchmark.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from steelyard.ir.graph import Argument, Body, Graph, Node, Ref, SlicedValue, Tensor
from steelyard.operators import live, operator_named

_NEGATED = operator_named("aten._neg_view.default")

# Random values are drawn once and copied from this pool, because drawing them takes longer than
# most operators.
_POOL = 1 << 20
_RUN = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arguments:
    """The arguments of one operator call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class InputFactory:
    """Makes operator arguments on one device, without advancing torch's random generators."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)
        # Values from 0.1 to 1 are valid as probability, variance, argument of a logarithm, divisor
        # and step count.
        self._floats = (
            torch.rand(_POOL, generator=self._generator, device="cpu").mul_(0.9).add_(0.1)
        )
        self._pools: dict[torch.dtype, torch.Tensor] = {}

    def arguments(self, graph: Graph, node: Node) -> Arguments:
        bounds = index_bounds(graph, node)
        tensors = {
            name: self.tensor(graph.by_name[name].outputs[0], below=bounds.get(name, 1))
            for name in node.inputs
        }
        return _with_tensors(node, tensors)

    def produced_arguments(self, graph: Graph, node: Node) -> Arguments:
        """Return ``arguments``, but compute elements of tuples instead of drawing random values.

        Under mixed precision a kernel may save statistics in another dtype than the graph says
        (torch 2.13: native_layer_norm), and its backward requires the saved dtype.
        """
        tensors = dict(self.arguments(graph, node).tensors)
        for name in node.inputs:
            taken = graph.by_name[name]
            if taken.is_getitem:
                whole = graph.by_name[taken.inputs[0]]
                given = self.arguments(graph, whole)
                results = operator_named(whole.op)(*given.args, **given.kwargs)
                tensors[name] = results[taken.args[1]]
        return _with_tensors(node, tensors)

    def tensor(self, like: Tensor, *, below: int = 1) -> torch.Tensor:
        """Return a tensor with the shape, strides and dtype of ``like``, on as small a storage as
        possible.
        """
        dtype = dtype_named(like.dtype)
        extent = extent_of(like)
        flat = torch.empty(extent, dtype=dtype, device=self._device)
        if below > 1 and not (dtype.is_floating_point or dtype.is_complex):
            flat.copy_(
                torch.randint(
                    below, (extent,), generator=self._generator, device="cpu", dtype=dtype
                )
            )
        else:
            _tile(flat, self._pool(dtype))
        made = flat.as_strided(like.shape, like.stride)
        made = made.conj() if "conj" in like.pending else made
        return _NEGATED(made) if "neg" in like.pending else made

    def _pool(self, dtype: torch.dtype) -> torch.Tensor:
        pool = self._pools.get(dtype)
        if pool is None:
            if dtype is torch.bool:
                # Masks in models are triangles and padding. With random masks, branches cannot be
                # predicted and masked_fill takes three times as long.
                pool = torch.arange(_POOL, device="cpu") // _RUN % 2 == 0
            elif dtype.is_floating_point or dtype.is_complex:
                pool = self._floats.to(dtype)
            else:
                # Zero is the only index that is always valid.
                pool = torch.zeros(_POOL, dtype=dtype, device="cpu")
            pool = self._pools[dtype] = pool.to(self._device)
        return pool


def _with_tensors(node: Node, tensors: dict[str, torch.Tensor]) -> Arguments:
    return Arguments(
        args=tuple(live(a, tensors) for a in node.args),
        kwargs={key: live(a, tensors) for key, a in node.kwargs},
        tensors=tensors,
    )


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def extent_of(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last that the strides reach."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride))


def nbytes_of(graph: Graph, node: Node) -> int:
    """Return the bytes that the arguments and results of this node need when it runs alone."""
    tensors = [graph.by_name[name].outputs[0] for name in node.inputs] + list(node.outputs)
    return sum(extent_of(t) * dtype_named(t.dtype).itemsize for t in tensors)


def shortened(graph: Graph, node: Node, *, parts: int) -> Graph:
    """Return a graph of this call alone, on ``parts`` slices whose inputs are in device memory."""
    body = node.body
    assert body is not None
    count = body.calls[-1][0]
    rows = count * parts

    def short(given: SlicedValue) -> SlicedValue:
        tensor = given.tensor
        if given.along is None:
            return given
        shape, stride = list(tensor.shape), list(tensor.stride)
        if given.along == 0:
            shape = [rows * given.unit, *shape[given.dims :]]
            stride = stride[given.dims - 1 :]
        else:
            shape[-1] = rows * given.unit
        tensor = replace(tensor, shape=tuple(shape), stride=tuple(stride))
        return replace(given, tensor=tensor, dims=1)

    takes, gives = tuple(map(short, body.takes)), tuple(map(short, body.gives))
    part = replace(body, rows=rows, parts=parts, takes=takes, gives=gives, calls=body.calls[-1:])
    inputs = [Node(name=t.name, op="input", outputs=(t.tensor,)) for t in takes]
    call = replace(
        node,
        args=tuple(Ref(t.name) for t in takes),
        inputs=tuple(t.name for t in takes),
        outputs=tuple(given.tensor for given in gives),
        signature=f"{node.signature}, {parts} slices of it",
        flops=node.flops * rows // body.rows,
        moved_bytes=node.moved_bytes * rows // body.rows,
        body=part,
    )
    return replace(graph, nodes=(*inputs, call), outputs=(), runs=())


def index_bounds(graph: Graph, node: Node) -> dict[str, int]:
    """Return exclusive upper bounds for integer inputs by name; inputs that are missing are
    zeros.
    """
    if node.body is not None:
        return _bounds_within(node.body)
    return _bounds(node, {name: graph.by_name[name].outputs[0].shape for name in node.inputs})


def _bounds_within(body: Body) -> dict[str, int]:
    """Return the smallest bound that any call sets; the row counts are those of the whole value."""
    shapes = {take.name: take.tensor.shape for take in body.takes}
    found: dict[str, int] = {}
    for node in body.calls[0][1]:
        shapes[node.name] = node.outputs[0].shape
        for name, below in _bounds(node, shapes).items():
            found[name] = min(below, found.get(name, below))
    return found


def _bounds(node: Node, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    op = _ALIASES.get(node.op, node.op.rpartition(".")[0])
    rule = _BOUNDS.get(op)
    if rule is None:
        return {}
    return {name: below for name, below in rule(_Shapes(shapes, node)) if name and below > 0}


class _Shapes:
    """The arguments of one node, by position."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], node: Node) -> None:
        self._shapes = shapes
        self._args = node.args

    def name(self, position: int) -> str:
        argument = self._args[position] if position < len(self._args) else None
        return argument.name if isinstance(argument, Ref) else ""

    def names(self, position: int) -> list[str]:
        argument = self._args[position]
        items: Sequence[Argument] = argument if isinstance(argument, tuple) else ()
        return [a.name if isinstance(a, Ref) else "" for a in items]

    def size(self, position: int, dim: int) -> int:
        shape = self._shapes[self.name(position)]
        return shape[dim] if shape else 1

    def number(self, position: int) -> int:
        argument = self._args[position]
        return argument if isinstance(argument, int) else 0

    def classes(self, position: int) -> int:
        """Return the size of dim 1 of scores (N, C, ...), or of the only dim of (C)."""
        shape = self._shapes[self.name(position)]
        return shape[min(1, len(shape) - 1)] if shape else 1


_Bounds = Callable[[_Shapes], list[tuple[str, int]]]


def _dim_bound(position: int) -> _Bounds:
    """Return the bounds for op(self, dim, index, ...)."""
    return lambda s: [(s.name(position + 2), s.size(position, s.number(position + 1)))]


def _indices(s: _Shapes) -> list[tuple[str, int]]:
    """Return the bounds for index(self, [index or None per dim], ...)."""
    return [(name, s.size(0, dim)) for dim, name in enumerate(s.names(1)) if name]


# Zeros are always valid. But if all indices refer to one row, neither the memory traffic of a
# lookup nor the work of its backward pass is realistic.
_BOUNDS: dict[str, _Bounds] = {
    "aten.embedding": lambda s: [(s.name(1), s.size(0, 0))],
    "aten.embedding_dense_backward": lambda s: [(s.name(1), s.number(2))],
    "aten._embedding_bag": lambda s: [(s.name(1), s.size(0, 0))],
    # Empty bags contribute nothing, so most bags should contain something.
    "aten._embedding_bag_backward": lambda s: [(s.name(1), s.number(6)), (s.name(4), s.size(1, 0))],
    "aten.nll_loss_forward": lambda s: [(s.name(1), s.classes(0))],
    "aten.nll_loss2d_forward": lambda s: [(s.name(1), s.classes(0))],
    "aten.nll_loss_backward": lambda s: [(s.name(2), s.classes(1))],
    "aten.nll_loss2d_backward": lambda s: [(s.name(2), s.classes(1))],
    "aten.gather": _dim_bound(0),
    "aten.scatter": _dim_bound(0),
    "aten.scatter_add": _dim_bound(0),
    "aten.scatter_reduce": _dim_bound(0),
    "aten.index_select": _dim_bound(0),
    "aten.index_add": _dim_bound(0),
    "aten.index": _indices,
    "aten._unsafe_index": _indices,
    "aten.index_put": _indices,
    "aten._unsafe_index_put": _indices,
}


_ALIASES = {"steelyard.nll_loss_sum": "aten.nll_loss_forward"}


def _tile(flat: torch.Tensor, pool: torch.Tensor) -> None:
    for start in range(0, flat.numel(), _POOL):
        part = flat[start : start + _POOL]
        part.copy_(pool[: part.numel()])
