"""Operators by name: what a graph calls ``aten.add.Tensor``, as something to call.

Also the few operators of our own that capture puts into a graph. Not for deciding which.
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
    OF_FACTORS,
    RIGHT,
)
from steelyard.ir.graph import (
    JOINED_ROWS,
    PRODUCTS,
    WHOLE_ROWS,
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
    """Carry out one node on live values; for the few that are not part of a program."""

    args = [live(a, values) for a in node.args]
    if node.is_getitem:
        return args[0][args[1]]
    return operator_named(node.op)(*args, **{k: live(a, values) for k, a in node.kwargs})


def live(argument: Argument, values: Mapping[str, Any]) -> Any:
    """The argument as torch takes it."""
    match argument:
        case Ref(name):
            return values[name]
        case Symbol(text):
            return torch_object(text)
        case tuple():
            return [live(a, values) for a in argument]
    return argument


def callable_of(node: Node) -> Operator:
    """What carries this node out."""
    return operator_named(node.op) if node.body is None else sliced(node.body)


def is_pointwise(op: str) -> bool:
    """Whether each element of the result depends on the elements in its place alone."""
    if op in _OWN or op.count(".") != 2:
        return False
    return torch.Tag.pointwise in getattr(operator_named(op), "tags", ())


def torch_object(text: str) -> Any:
    """``torch.float32``, ``torch.device('cpu')``: what a Symbol names, read and not evaluated."""
    name = text.removeprefix("torch.")
    if name.startswith("device("):
        return torch.device(name.removeprefix("device(").removesuffix(")").strip("'\""))
    return getattr(torch, name)


def copy_laid_out(x: torch.Tensor, shape: list[int], stride: list[int]) -> torch.Tensor:
    """``x`` on a storage of its own with the given strides."""
    return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def all_gather(share: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """Issue a gather of every rank's share; ``_c10d_functional.wait_tensor`` gives the whole.

    By way of the out variant: two calls of the plain one in flight corrupt the heap on gloo
    (torch 2.13).
    """
    whole = share.new_empty((num_ranks * share.shape[0], *share.shape[1:]))
    issued: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor_out(
        share, num_ranks, group, out=whole
    )
    return issued


def joined_rows(tensors: list[torch.Tensor], num_rows: int) -> torch.Tensor:
    """Each cut into as many equal rows, and rows of the same number side by side."""
    return torch.cat([x.reshape(num_rows, -1) for x in tensors], dim=1)


def whole_rows(joined: torch.Tensor, start: int, shape: list[int]) -> torch.Tensor:
    """One of those tensors, whose part of each row begins at ``start``, on memory of its own."""
    whole = joined.new_empty(shape)
    rows = whole.view(joined.shape[0], -1)
    rows.copy_(joined[:, start : start + rows.shape[1]])
    return whole


# Known to torch by name, so that a compiler takes it as one opaque, functional call.
_LIBRARY = torch.library.Library("steelyard", "FRAGMENT")
_LIBRARY.define(
    "bernoulli(SymInt[] size, float p, *, ScalarType dtype, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _bernoulli(
    size: Sequence[int], p: float, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What ``aten.bernoulli.p`` draws for a tensor of this size and dtype."""
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
    """``x * mask * scale``, of a boolean mask that lies in memory as ``x`` does.

    A product with booleans first writes them out as numbers; these can take the result, so that
    nothing is held but what goes in and what comes out.
    """
    return mask.to(x.dtype, copy=True).mul_(scale).mul_(x)


_LIBRARY.impl("masked_scale", masked_scale, "CompositeExplicitAutograd")
torch.library.register_fake("steelyard::masked_scale", masked_scale, lib=_LIBRARY)

_LIBRARY.define("encode8(Tensor x, SymInt[] stride) -> Tensor")
_LIBRARY.define("decode8(Tensor coded, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor")
# A slice stays in a core's own cache; two buffers of that size are all that a call holds besides.
_SLICE = 256 * BLOCK
# The least scale whose reciprocal is finite; of smaller values nothing is lost but themselves.
_LEAST_SCALE = 2.0**-126
# What is rounded to the code 1, and not to 0.
_LEAST_CODE = 0.501


def encode8(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """``x`` in 8 bits: its strides, the scale of each block of elements in memory order, all codes.

    A scale is the largest magnitude in its block over 127; where something is not finite, nor is
    the scale, and so nothing in that block comes back as a finite number. Codes are rounded to the
    nearest, but only a zero becomes a zero: the derivative of a relu asks which values are none,
    that of a division divides by them.
    """
    if not is_dense(x.shape, x.stride()):
        x = copy_laid_out(x, list(x.shape), list(stride))
    flat = x.as_strided((x.numel(),), (1,))
    coded = _encode8_fake(x, stride)
    strides, scales, codes = _parted(coded, x.dim(), x.numel())
    # Some kernels lay their result out otherwise than torch's description of them says; what is
    # read back lies as it did.
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
    """What ``encode8`` wrote down, rounded to 8 bits, laid out as before."""
    strides, scales, codes = _parted(coded, len(size), math.prod(size))
    real = strides.tolist()
    laid_out = real if is_dense(size, real) else stride
    x = torch.empty_strided(size, laid_out, dtype=dtype, device=coded.device)
    flat = x.as_strided((x.numel(),), (1,))
    is_narrow = dtype is not torch.float32
    buffer = flat.new_empty(min(_SLICE, x.numel()) if is_narrow else 0, dtype=torch.float32)
    for part, scale, code in _slices(flat, scales, codes):
        wide = buffer[: part.numel()].view_as(part) if is_narrow else part
        wide.copy_(code).mul_(scale)
        if is_narrow:
            part.copy_(wide)
    return x


def coding_error(x: torch.Tensor) -> torch.Tensor:
    """What 8 bits would lose of ``x``, as a share of its norm; not finite where ``x`` is not."""
    flat = x.as_strided((x.numel(),), (1,)) if is_dense(x.shape, x.stride()) else x.flatten()
    lost, norm = torch.zeros(2, dtype=torch.float64, device=x.device)
    for part in flat.split(_SLICE):
        back = decode8(encode8(part, (1,)), part.shape, (1,), part.dtype).double()
        norm += part.double().square().sum()
        lost += back.sub_(part).square().sum()
    # Of nothing, nothing is lost; what is not finite stays so.
    return torch.where(norm == 0, lost, lost / norm).sqrt()


def _parted(coded: torch.Tensor, dims: int, numel: int) -> tuple[torch.Tensor, ...]:
    strides, scales, codes = coded.tensor_split((8 * dims, coded.numel() - numel))
    return strides.view(torch.int64), scales.view(torch.float32), codes.view(torch.int8)


def _slices(
    flat: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Blocks as rows, each with its scale and its codes; a last block that is shorter, alone."""
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
    """What ``aten.nll_loss_forward`` loses in these rows together."""
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
    """What ``aten.nll_loss_forward`` divides a mean by."""
    counts = targets != ignore_index
    if weight is None:
        return counts.sum().to(dtype)
    weights = weight[targets.where(counts, targets.new_zeros(()))]
    total: torch.Tensor = weights.mul(counts).sum().to(dtype)
    return total


class Parted(Protocol):
    """A tensor that is never there whole, but for its rows handed over in their order."""

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor: ...


def sliced(body: Body) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Carries the calls of ``body`` out for one part of the rows after another."""
    kept = {given.name for given in body.gives if given.along != -1}
    calls = {count: _prepared(nodes, kept) for count, nodes in body.calls}
    adds = {given.name for given in body.gives if given.along is None}
    read = {i for node in body.calls[0][1] for i in node.inputs}
    # A product that is only added up is added to the sum by the product's own kernel.
    products = {
        node.name for node in body.calls[0][1] if node.op in PRODUCTS and node.name in adds - read
    }

    def run(*taken: torch.Tensor | Parted) -> tuple[torch.Tensor, ...]:
        flat = [_rows_of(take, x) for take, x in zip(body.takes, taken, strict=True)]
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
            for call, dying in calls[count]:
                call(values, results)
                for name in dying:
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
    """What a body gives, as it grows part by part."""

    def __init__(self, gives: tuple[SlicedValue, ...], products: set[str]) -> None:
        self._gives = gives
        self._products = products
        self._columns = {given.name: given.tensor for given in gives if given.along == -1}
        self._grown: dict[str, torch.Tensor] = {}
        self._start = self._count = 0

    def begin(self, start: int, count: int) -> None:
        """The part that is next."""
        self._start, self._count = start, count

    def place(self, name: str, device: torch.device) -> torch.Tensor | None:
        """Where this part of a value in columns belongs; None of any other."""
        tensor = self._columns.get(name)
        if tensor is None:
            return None
        whole = self._grown.get(name)
        if whole is None:
            dtype = getattr(torch, tensor.dtype)
            whole = self._grown[name] = torch.empty(tensor.shape, dtype=dtype, device=device)
        return whole.narrow(-1, self._start, self._count)

    def add_product(self, name: str, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Whether ``left @ right`` was added to the sum of that name."""
        total = self._grown.get(name)
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
                continue  # added already, or where it belongs
            total = self._grown.get(given.name)
            if given.along is None:
                self._grown[given.name] = _added(total, value)
                continue
            if total is None:
                tensor = given.tensor
                rows = torch.empty(tensor.shape, dtype=value.dtype, device=value.device)
                total = self._grown[given.name] = rows.flatten(0, given.dims - 1)
            total.narrow(0, self._start * given.unit, self._count * given.unit).copy_(value)

    def whole(self) -> tuple[torch.Tensor, ...]:
        return tuple(
            self._grown.pop(given.name).to(getattr(torch, given.tensor.dtype)).view(
                given.tensor.shape
            )
            for given in self._gives
        )  # fmt: skip


def _added(total: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Sums of half precision are kept in single: each slice would round them anew."""
    if total is None:
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    return total.add_(value)


_SlicedCall = Callable[[dict[str, torch.Tensor], _Results], None]


def _prepared(nodes: Sequence[Node], kept: set[str]) -> list[tuple[_SlicedCall, list[str]]]:
    """Each call, and whose last reader it is."""
    last = {name: place for place, node in enumerate(nodes) for name in (node.name, *node.inputs)}
    dying: list[list[str]] = [[] for _ in nodes]
    for name, place in last.items():
        if name not in kept:
            dying[place].append(name)
    read = {name for node in nodes for name in node.inputs}
    return [
        (_sliced_call(node, is_read=node.name in read), names)
        for node, names in zip(nodes, dying, strict=True)
    ]


def _sliced_call(node: Node, *, is_read: bool) -> _SlicedCall:
    operator = operator_named(node.op)
    # What is read in the same part is better off dense: kernels have other ways for what is not.
    into = None if is_read else _INTO.get(node.op)
    is_product = node.op in PRODUCTS

    def call_on(values: dict[str, torch.Tensor], results: _Results) -> None:
        args = [live(a, values) for a in node.args]
        # What is added to a product, before the sum of its terms, is so once.
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


_INTO: Mapping[str, Operator] = {"aten.mm.default": torch.mm, "aten.addmm.default": torch.addmm}


_OWN: dict[str, Operator] = {
    "steelyard.nll_loss_sum": nll_loss_sum,
    "steelyard.nll_loss_weight": nll_loss_weight,
    "steelyard.all_gather": all_gather,
    JOINED_ROWS: joined_rows,
    WHOLE_ROWS: whole_rows,
    "steelyard.copy_laid_out": copy_laid_out,
    "steelyard.coding_error": coding_error,
    ENCODE: gradient_codecs.encode_gradients,
    ENCODE_SUM: gradient_codecs.encode_sum,
    DECODE: gradient_codecs.decode_gradients,
    DECODE_SUM: gradient_codecs.decode_sum,
    LEFT: low_rank.left_factors,
    RIGHT: low_rank.right_factors,
    OF_FACTORS: low_rank.of_factors,
    "steelyard.batch_statistics": sync_batchnorm.batch_statistics,
    "steelyard.joint_statistics": sync_batchnorm.joint_statistics,
    "steelyard.moved_mean": sync_batchnorm.moved_mean,
    "steelyard.moved_variance": sync_batchnorm.moved_variance,
    "steelyard.normalised": sync_batchnorm.normalised,
    "steelyard.normalised_backward": sync_batchnorm.normalised_backward,
    "steelyard.normalised_sums": sync_batchnorm.normalised_sums,
}
