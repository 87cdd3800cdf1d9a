"""Finds the callable for an operator name such as ``aten.add.Tensor``.

It also defines the ``steelyard.*`` operators that capture and passes put into a graph. Not for
deciding where they are used.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from steelyard.ir.gradient_codec import (
    DECODE,
    DECODE_SUM,
    ENCODE,
    ENCODE_SUM,
    LEFT,
    MATRICES_OF_FACTORS,
    RIGHT,
)
from steelyard.ir.graph import (
    PACK_ROWS,
    PRODUCTS,
    UNPACK_ROWS,
    Argument,
    Body,
    Node,
    Ref,
    SlicedValue,
    Symbol,
)
from steelyard.ir.quantized_activation import BLOCK, coded_bytes, is_dense
from steelyard.operators import gradient_codecs, low_rank, sync_batchnorm

Operator = Callable[..., Any]


def operator_named(op: str) -> Operator:
    own = _OWN.get(op)
    if own is not None:
        return own
    namespace, name, overload = op.split(".")
    operator: Operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return operator


def call(node: Node, values: Mapping[str, Any]) -> Any:
    """Run one node on live values. This is for the few nodes that are not part of a program."""

    args = [live(a, values) for a in node.args]
    if node.is_getitem:
        return args[0][args[1]]
    return operator_named(node.op)(*args, **{k: live(a, values) for k, a in node.kwargs})


def live(argument: Argument, values: Mapping[str, Any]) -> Any:
    """Convert a node argument to the value that is passed to the torch operator."""
    match argument:
        case Ref(name):
            return values[name]
        case Symbol(text):
            return torch_object(text)
        case tuple():
            return [live(a, values) for a in argument]
    return argument


def callable_of(node: Node) -> Operator:
    """Return the callable that executes this node."""
    return operator_named(node.op) if node.body is None else sliced(node.body)


def is_pointwise(op: str) -> bool:
    """True if each result element depends only on the input elements at the same position."""
    if op in _OWN or op.count(".") != 2:
        return False
    return torch.Tag.pointwise in getattr(operator_named(op), "tags", ())


def torch_object(text: str) -> Any:
    """Parse the text of a Symbol (``torch.float32``, ``torch.device('cpu')``) without eval."""
    name = text.removeprefix("torch.")
    if name.startswith("device("):
        return torch.device(name.removeprefix("device(").removesuffix(")").strip("'\""))
    return getattr(torch, name)


def copy_strided(x: torch.Tensor, shape: list[int], stride: list[int]) -> torch.Tensor:
    """Copy ``x`` to a new storage with the given strides."""
    return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def all_gather(share: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """Issue an all-gather of the ranks' shards; ``_c10d_functional.wait_tensor`` completes it.

    This uses the out variant, because two calls of the functional variant in flight corrupt the
    heap on gloo (torch 2.13).
    """
    whole = share.new_empty((num_ranks * share.shape[0], *share.shape[1:]))
    issued: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor_out(
        share, num_ranks, group, out=whole
    )
    return issued


def pack_rows(tensors: list[torch.Tensor], num_rows: int) -> torch.Tensor:
    """Reshape each tensor to ``num_rows`` equal rows and concatenate them along dim 1."""
    return torch.cat([x.reshape(num_rows, -1) for x in tensors], dim=1)


def unpack_rows(joined: torch.Tensor, start: int, shape: list[int]) -> torch.Tensor:
    """Copy one tensor out of the rows that ``pack_rows`` joined; its columns begin at ``start``."""
    whole = joined.new_empty(shape)
    rows = whole.view(joined.shape[0], -1)
    rows.copy_(joined[:, start : start + rows.shape[1]])
    return whole


# Registered with torch, so that a compiler treats each operator as one opaque, functional call.
_LIBRARY = torch.library.Library("steelyard", "FRAGMENT")
_LIBRARY.define(
    "bernoulli(SymInt[] size, float p, *, ScalarType dtype, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _bernoulli(
    size: Sequence[int], p: float, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Draw the numbers that ``aten.bernoulli.p`` draws for a tensor of this size and dtype."""
    return torch.empty(size, dtype=dtype, device=device).bernoulli_(p)


def _bernoulli_fake(
    size: Sequence[int],
    p: float,  # noqa: ARG001 - the schema's
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


_LIBRARY.impl("bernoulli", _bernoulli, "CompositeExplicitAutograd")
torch.library.register_fake("steelyard::bernoulli", _bernoulli_fake, lib=_LIBRARY)
_LIBRARY.define(
    "masked_scale(Tensor x, Tensor mask, float scale) -> Tensor", tags=(torch.Tag.pointwise,)
)


def masked_scale(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``x * mask * scale`` for a boolean mask with the strides of ``x``.

    Before the product, the boolean mask is converted to numbers. The result is written into the
    converted tensor, so no memory is allocated beyond inputs and result.
    """
    return mask.to(x.dtype, copy=True).mul_(scale).mul_(x)


_LIBRARY.impl("masked_scale", masked_scale, "CompositeExplicitAutograd")
torch.library.register_fake("steelyard::masked_scale", masked_scale, lib=_LIBRARY)

_LIBRARY.define("encode8(Tensor x, SymInt[] stride) -> Tensor")
_LIBRARY.define("decode8(Tensor coded, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor")
# A slice of this size fits into a core's private cache; the workspace of a call is two buffers of
# this size.
_SLICE = 256 * BLOCK
# The smallest scale with a finite reciprocal. Blocks of smaller values also use this scale; their
# error is below it.
_LEAST_SCALE = 2.0**-126
# A lower bound for scaled magnitudes, which rounds to the code 1 instead of 0.
_LEAST_CODE = 0.501


def encode8(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Quantize ``x`` to 8 bits; return its strides, one scale per block in memory order, and all
    codes.

    A scale is the largest magnitude of its block over 127. A block with a non-finite element has
    a non-finite scale, so none of its elements decodes to a finite number. Codes are rounded to
    nearest, except that only zeros become the code 0: the derivative of relu tests for zero and
    the derivative of a division divides by the value.
    """
    if not is_dense(x.shape, x.stride()):
        x = copy_strided(x, list(x.shape), list(stride))
    flat = x.as_strided((x.numel(),), (1,))
    coded = _encode8_fake(x, stride)
    strides, scales, codes = _split_coded(coded, x.dim(), x.numel())
    # Some kernels return tensors with other strides than their fake kernels declare. The real
    # strides are stored, so that the decoded tensor has them too.
    strides.copy_(torch.tensor(x.stride(), device="cpu"))
    buffers = flat.new_empty(2, min(_SLICE, flat.numel()), dtype=torch.float32)
    for part, scale, code in _slices(flat, scales, codes):
        wide, sign = (buffer[: part.numel()].view_as(part) for buffer in buffers)
        if part.dtype is not torch.float32:
            part = wide.copy_(part)
        torch.amax(part, 1, keepdim=True, out=scale)
        least = torch.amin(part, 1, keepdim=True)
        torch.maximum(scale, least.neg_(), out=scale)
        scale.div_(127).clamp_min_(_LEAST_SCALE)
        torch.sign(part, out=sign)
        torch.div(part, scale, out=wide)
        code.copy_(wide.abs_().clamp_min_(_LEAST_CODE).mul_(sign).round_())
    return coded


def decode8(
    coded: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize the result of ``encode8`` from 8 bits, with the strides of the original."""
    strides, scales, codes = _split_coded(coded, len(size), math.prod(size))
    real = strides.tolist()
    result_stride = real if is_dense(size, real) else stride
    x = torch.empty_strided(size, result_stride, dtype=dtype, device=coded.device)
    flat = x.as_strided((x.numel(),), (1,))
    is_narrow = dtype is not torch.float32
    buffer = flat.new_empty(min(_SLICE, x.numel()) if is_narrow else 0, dtype=torch.float32)
    for part, scale, code in _slices(flat, scales, codes):
        wide = buffer[: part.numel()].view_as(part) if is_narrow else part
        wide.copy_(code).mul_(scale)
        if is_narrow:
            part.copy_(wide)
    return x


def quantization_error(x: torch.Tensor) -> torch.Tensor:
    """Return the relative error (L2 norm) of ``x`` in 8 bits; it is not finite if ``x`` is not."""
    flat = x.as_strided((x.numel(),), (1,)) if is_dense(x.shape, x.stride()) else x.flatten()
    lost, norm = torch.zeros(2, dtype=torch.float64, device=x.device)
    for part in flat.split(_SLICE):
        decoded = decode8(encode8(part, (1,)), part.shape, (1,), part.dtype).double()
        norm += part.double().square().sum()
        lost += decoded.sub_(part).square().sum()
    # A zero tensor has zero error; a non-finite norm gives a non-finite result.
    return torch.where(norm == 0, lost, lost / norm).sqrt()


def _split_coded(coded: torch.Tensor, dims: int, numel: int) -> tuple[torch.Tensor, ...]:
    strides, scales, codes = coded.tensor_split((8 * dims, coded.numel() - numel))
    return strides.view(torch.int64), scales.view(torch.float32), codes.view(torch.int8)


def _slices(
    flat: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield (blocks as rows, scales, codes); if the last block is shorter, it is yielded
    separately.
    """
    whole = flat.numel() // BLOCK * BLOCK
    for start in range(0, whole, _SLICE):
        end = min(start + _SLICE, whole)
        scale = scales[start // BLOCK : end // BLOCK].unsqueeze(1)
        yield flat[start:end].view(-1, BLOCK), scale, codes[start:end].view(-1, BLOCK)
    if whole < flat.numel():
        yield flat[whole:].unsqueeze(0), scales[-1:].unsqueeze(1), codes[whole:].unsqueeze(0)


def _encode8_fake(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty(coded_bytes(x.numel(), dims=x.dim()), dtype=torch.uint8)


def _decode8_fake(
    coded: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=coded.device)


_LIBRARY.impl("encode8", encode8, "CompositeExplicitAutograd")
_LIBRARY.impl("decode8", decode8, "CompositeExplicitAutograd")
torch.library.register_fake("steelyard::encode8", _encode8_fake, lib=_LIBRARY)
torch.library.register_fake("steelyard::decode8", _decode8_fake, lib=_LIBRARY)


def nll_loss_sum(
    scores: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
) -> torch.Tensor:
    """Return the loss of ``aten.nll_loss_forward``, a sum over these rows."""
    lost: torch.Tensor
    lost, _ = torch.ops.aten.nll_loss_forward(scores, targets, weight, reduction, ignore_index)
    return lost


def nll_loss_weight(
    _: None,
    targets: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,  # noqa: ARG001 - called as aten.nll_loss_forward, but without scores
    ignore_index: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the total weight by which ``aten.nll_loss_forward`` divides a mean."""
    counts = targets != ignore_index
    if weight is None:
        return counts.sum().to(dtype)
    weights = weight[targets.where(counts, targets.new_zeros(()))]
    total: torch.Tensor = weights.mul(counts).sum().to(dtype)
    return total


class Parted(Protocol):
    """A tensor that never exists as a whole; its slices are provided in order."""

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor: ...


def sliced(body: Body) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function that runs the calls of ``body`` on one slice of rows after the other."""
    live_out = {given.name for given in body.gives if given.along != -1}
    calls = {count: _with_last_uses(nodes, live_out) for count, nodes in body.calls}
    sums = {given.name for given in body.gives if given.along is None}
    read = {i for node in body.calls[0][1] for i in node.inputs}
    # A product that is only summed over slices is accumulated by the matmul kernel (addmm).
    products = {
        node.name for node in body.calls[0][1] if node.op in PRODUCTS and node.name in sums - read
    }

    def run(*inputs: torch.Tensor | Parted) -> tuple[torch.Tensor, ...]:
        flat = [_rows_of(take, x) for take, x in zip(body.takes, inputs, strict=True)]
        results = _Results(body.gives, products)
        start = 0
        for count in body.counts():
            values = {
                take.name: x
                if take.along is None
                else x.narrow(take.along, start * take.unit, count * take.unit)
                for take, x in zip(body.takes, flat)
            }
            results.begin(start, count)
            for call, last_used in calls[count]:
                call(values, results)
                for name in last_used:
                    del values[name]
            results.take(values)
            start += count
        return results.whole()

    return run


def _rows_of(take: SlicedValue, x: torch.Tensor | Parted) -> Any:
    if take.along == 0 and take.dims > 1:
        assert isinstance(x, torch.Tensor)
        return x.flatten(0, take.dims - 1)
    return x


class _Results:
    """Collects the results of a sliced body, slice by slice."""

    def __init__(self, gives: tuple[SlicedValue, ...], products: set[str]) -> None:
        self._gives = gives
        self._products = products
        self._columns = {given.name: given.tensor for given in gives if given.along == -1}
        self._partial: dict[str, torch.Tensor] = {}
        self._start = self._count = 0

    def begin(self, start: int, count: int) -> None:
        """Set the row range for the next slice."""
        self._start, self._count = start, count

    def place(self, name: str, device: torch.device) -> torch.Tensor | None:
        """Return the output slice of a value that is sliced along its last dim, otherwise None."""
        tensor = self._columns.get(name)
        if tensor is None:
            return None
        whole = self._partial.get(name)
        if whole is None:
            dtype = getattr(torch, tensor.dtype)
            whole = self._partial[name] = torch.empty(tensor.shape, dtype=dtype, device=device)
        return whole.narrow(-1, self._start, self._count)

    def add_product(self, name: str, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Add ``left @ right`` to the named sum; False if that value has no sum to add to yet."""
        total = self._partial.get(name)
        if name not in self._products or total is None:
            return False
        if total.dtype is left.dtype:
            total.addmm_(left, right)
        else:
            total.add_(torch.mm(left, right))
        return True

    def take(self, values: dict[str, torch.Tensor]) -> None:
        for given in self._gives:
            value = values.pop(given.name, None)
            if value is None or given.along == -1:
                continue  # already accumulated, or written in place
            total = self._partial.get(given.name)
            if given.along is None:
                self._partial[given.name] = _accumulated(total, value)
                continue
            if total is None:
                tensor = given.tensor
                rows = torch.empty(tensor.shape, dtype=value.dtype, device=value.device)
                total = self._partial[given.name] = rows.flatten(0, given.dims - 1)
            total.narrow(0, self._start * given.unit, self._count * given.unit).copy_(value)

    def whole(self) -> tuple[torch.Tensor, ...]:
        return tuple(
            self._partial.pop(given.name).to(getattr(torch, given.tensor.dtype)).view(
                given.tensor.shape
            )
            for given in self._gives
        )  # fmt: skip


def _accumulated(total: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Accumulate a sum. Half precision is summed in float32, so that not every slice rounds it."""
    if total is None:
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    return total.add_(value)


_SlicedCall = Callable[[dict[str, torch.Tensor], _Results], None]


def _with_last_uses(
    nodes: Sequence[Node], live_out: set[str]
) -> list[tuple[_SlicedCall, list[str]]]:
    """Return a callable for each node, with the names of the values that die after it."""
    last = {name: index for index, node in enumerate(nodes) for name in (node.name, *node.inputs)}
    last_used: list[list[str]] = [[] for _ in nodes]
    for name, index in last.items():
        if name not in live_out:
            last_used[index].append(name)
    read = {name for node in nodes for name in node.inputs}
    return [
        (_sliced_call(node, is_read=node.name in read), names)
        for node, names in zip(nodes, last_used, strict=True)
    ]


def _sliced_call(node: Node, *, is_read: bool) -> _SlicedCall:
    operator = operator_named(node.op)
    # A value that other calls of the slice read should be dense, because kernels take other code
    # paths for strided inputs.
    into = None if is_read else _OUT_VARIANTS.get(node.op)
    is_product = node.op in PRODUCTS

    def call_on(values: dict[str, torch.Tensor], results: _Results) -> None:
        args = [live(a, values) for a in node.args]
        # The input that addmm adds to its product must be added only once; the first slice does it.
        if is_product and results.add_product(node.name, *args[-2:]):
            return
        kwargs = {key: live(a, values) for key, a in node.kwargs}
        device = values[node.inputs[0]].device if node.inputs else torch.device("cpu")
        place = results.place(node.name, device)
        if place is not None and into is not None:
            values[node.name] = into(*args, **kwargs, out=place)
            return
        values[node.name] = value = operator(*args, **kwargs)
        if place is not None:
            place.copy_(value)

    return call_on


_OUT_VARIANTS: Mapping[str, Operator] = {
    "aten.mm.default": torch.mm,
    "aten.addmm.default": torch.addmm,
}


_OWN: dict[str, Operator] = {
    "steelyard.nll_loss_sum": nll_loss_sum,
    "steelyard.nll_loss_weight": nll_loss_weight,
    "steelyard.all_gather": all_gather,
    PACK_ROWS: pack_rows,
    UNPACK_ROWS: unpack_rows,
    "steelyard.copy_strided": copy_strided,
    "steelyard.quantization_error": quantization_error,
    ENCODE: gradient_codecs.encode_gradients,
    ENCODE_SUM: gradient_codecs.encode_sum,
    DECODE: gradient_codecs.decode_gradients,
    DECODE_SUM: gradient_codecs.decode_sum,
    LEFT: low_rank.left_factors,
    RIGHT: low_rank.right_factors,
    MATRICES_OF_FACTORS: low_rank.matrices_of_factors,
    "steelyard.batch_norm_stats": sync_batchnorm.batch_norm_stats,
    "steelyard.batch_norm_gather_stats": sync_batchnorm.batch_norm_gather_stats,
    "steelyard.update_running_mean": sync_batchnorm.update_running_mean,
    "steelyard.update_running_var": sync_batchnorm.update_running_var,
    "steelyard.batch_norm_elemt": sync_batchnorm.batch_norm_elemt,
    "steelyard.batch_norm_backward_elemt": sync_batchnorm.batch_norm_backward_elemt,
    "steelyard.batch_norm_backward_reduce": sync_batchnorm.batch_norm_backward_reduce,
}
