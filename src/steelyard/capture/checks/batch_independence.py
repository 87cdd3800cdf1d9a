"""Whether a loss lets samples see each other: what is put together from them may only be added up.

A divisor that the batch gives, a mean that is taken off, weights by class make a loss no mean over
samples, and numbers show that only where the samples at hand differ in them. So operators are
looked at: the loss is run on fake tensors, for a number of samples that no size in the step is a
multiple of. A dim that is one holds samples. What depends on the batch and has no such dim is put
together from samples, and has to reach the loss by sums alone.

Operators that mix samples and keep their dim are looked at where what they do to it is plain: a
shift or a sort along it, rows looked up by a random draw. Not for others, such as rows looked up by
what the batch says, which experts do to their own: numbers show those, see
capture/batch/splitting.py.
"""

import itertools
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.eager_baseline import on_fakes
from steelyard.capture.tracing.fake_execution import StorageWatch
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.source_lines import is_users, short_file
from steelyard.errors import CaptureRefused
from steelyard.ir.graph import Graph

_SUMS = ("add", "sub", "rsub", "neg", "sum", "mean", "cat", "stack", "clone", "_unsafe_view")
_PRODUCTS = ("mul", "mm", "bmm", "mv", "dot")
_QUOTIENTS = ("aten.div.Tensor", "aten.div_.Tensor", "aten.div.Scalar", "aten.div_.Scalar")
_ADD_SAMPLES_UP = ("sum", "mean", "mm", "bmm", "mv", "dot", "index_add", "scatter_add")
_KEEP_OR_FILL = {"where": 0, "masked_fill": 1, "index_put": 1}  # and which argument says where
_FUSED_LOSSES = ("loss", "binary_cross_entropy")
_GO_ALONG_A_DIM = (
    *("_softmax", "_log_softmax", "logcumsumexp", "cumsum", "cumprod", "cummax", "cummin"),
    *("flip", "roll"),
)
_SORT = ("sort", "topk")
_LOOK_UP_ROWS = ("index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl")
_LOOK_UP_ALONG_A_DIM = (
    *("gather", "scatter", "scatter_add", "scatter_reduce"),
    *("index_select", "index_copy", "index_add", "index_reduce", "index_fill"),
)


def coupling(model: nn.Module, loss: Loss, batch: Any, graph: Graph) -> str:
    """Where samples see each other; empty where no operator shows it."""
    samples = _unlike_any_size_of(graph)
    try:
        with on_fakes(model, batch) as (mode, parameters, fake_batch), mode, _torch.quiet_logs():
            return _followed(model, loss, fake_batch, samples, [*parameters.values()])
    except CaptureRefused as error:
        return f"with {samples} samples {error.happened}"


def _unlike_any_size_of(graph: Graph) -> int:
    """A prime, for no product of others to be a multiple of it; small, for losses that loop."""
    sizes = {size for node in graph.nodes for t in node.outputs for size in t.shape if size}
    primes = (n for n in itertools.count(101, 2) if all(n % d for d in range(3, n, 2)))
    return next(n for n in primes if all(size % n for size in sizes))


def _followed(
    model: nn.Module, loss: Loss, batch: Any, samples: int, parameters: Sequence[nn.Parameter]
) -> str:
    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.new_empty((samples, *leaf.shape[1:]))

    batch = _torch.tree_map(resized, batch)
    follower = _Follower(_tensors(batch), samples)
    with StorageWatch(_tensors(batch), on_call=follower.follow, on_death=follower.forget):
        value = loss(model, batch)
        reason = follower.reason_of(value)
        if not reason:
            follower.is_in_backward = True
            value.backward()
    gradients = [p.grad for p in parameters if p.grad is not None]
    return reason or next(filter(None, map(follower.reason_of, gradients)), "")


class _Follower:
    """Notes of each storage that depends on the batch where samples saw each other on its way.

    Of storages, so that what is written through one view is known of the others.
    """

    def __init__(self, batch: Sequence[torch.Tensor], samples: int) -> None:
        self._samples = samples
        self.is_in_backward = False
        self._reasons = {_torch.storage_key(leaf): "" for leaf in batch}
        self._drawn: set[int] = set()  # storages that hold random draws

    def reason_of(self, value: torch.Tensor) -> str:
        return self._reasons.get(_torch.storage_key(value), "")

    def forget(self, storage: int) -> None:
        self._reasons.pop(storage, None)
        self._drawn.discard(storage)

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        read = _tensors(args[:2] if _is_routed(func) else (args, kwargs))
        given = [x for x in read if _torch.storage_key(x) in self._reasons]
        made = _tensors(result)
        if _reads_shapes_alone(func):
            given = []
        if _torch.draws(func, args, kwargs):
            # Draws weighed by the batch are whole numbers; the batch with dropout is none.
            is_drawn = not given or not any(x.is_floating_point() for x in made)
        else:
            is_drawn = any(map(self._is_drawn, read)) and all(map(self._is_drawn, given))
        if is_drawn:
            self._drawn.update(map(_torch.storage_key, made))
        if not given or not made:
            return
        known = next(filter(None, map(self.reason_of, given)), "")
        # The derivative of what lets no sample see another does not either; what a user writes into
        # a backward pass, a clip by the norm of the batch's gradient say, may well do.
        is_looked_at = not self.is_in_backward or _is_users_own()
        reason = known or (self._reason(func, args, kwargs, given, made) if is_looked_at else "")
        for tensor in made:
            key = _torch.storage_key(tensor)
            self._reasons[key] = self._reasons.get(key) or reason

    def _reason(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        given: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
    ) -> str:
        together = [x for x in given if not self._dims(x)]
        apart = [x for x in made if self._dims(x)]
        if together and (apart or not _is_linear(func, args, given, made)):
            fault = "takes a value that all samples give together"
        elif not together and not apart and not _adds_samples_up(func):
            fault = "makes one value of all samples"
        elif any(self._holds_pairs(x) for x in apart):
            fault = "pairs samples"
        elif "batch_norm" in _name(func) and self._dims(args[0]) not in ({0}, {1}):
            # Along the first dim they are known to whoever asks; along the second each has its own.
            fault = "takes statistics of samples"
        elif _name(func) in _GO_ALONG_A_DIM and self._goes_along_samples(func, args, kwargs):
            fault = "goes from sample to sample"
        elif _name(func) in _SORT and self._sorts_samples(func, args, kwargs):
            fault = "puts samples in order"
        elif self._looks_up_by_chance(func, args):
            fault = "looks samples up by a random draw"
        else:
            return ""
        return f"{_name(func)} {fault}{_place()}: samples see each other"

    def _dims(self, tensor: torch.Tensor) -> set[int]:
        """Those that hold samples."""
        return {d for d, size in enumerate(tensor.shape) if size and size % self._samples == 0}

    def _holds_pairs(self, tensor: torch.Tensor) -> bool:
        dims = self._dims(tensor)
        return len(dims) > 1 or any(tensor.shape[d] % self._samples**2 == 0 for d in dims)

    def _goes_along_samples(self, func: Any, args: Any, kwargs: Any) -> bool:
        dims = _torch.argument(func, args, kwargs, "dim", "dims")
        dims = dims if isinstance(dims, (list, tuple)) else (dims,)
        dims = dims or range(args[0].dim())  # a roll of all elements
        return any(d % args[0].dim() in self._dims(args[0]) for d in dims)

    def _sorts_samples(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whole numbers may be sorted: the experts that tokens chose are."""
        return args[0].is_floating_point() and self._goes_along_samples(func, args, kwargs)

    def _looks_up_by_chance(self, func: Any, args: Any) -> bool:
        dims = self._dims(args[0]) if isinstance(args[0], torch.Tensor) else ()
        return any(self._is_drawn(x) for dim, x in _indices(func, args) if dim in dims)

    def _is_drawn(self, tensor: torch.Tensor) -> bool:
        return _torch.storage_key(tensor) in self._drawn


def _is_linear(
    func: Any, args: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
) -> bool:
    """A sum, a product with what does not depend on the batch, or a choice by that."""
    name = _name(func)
    if name in ("_to_copy", "copy"):
        return all(x.is_floating_point() or x.is_complex() for x in made)
    if name in _PRODUCTS or str(func) in _QUOTIENTS:
        return len(given) == 1 and (name in _PRODUCTS or given[0] is args[0])
    if name in _KEEP_OR_FILL:
        return not any(x is y for x in _tensors(args[_KEEP_OR_FILL[name]]) for y in given)
    return _torch.is_view(func) or name in _SUMS


def _adds_samples_up(func: Any) -> bool:
    """One that looks at some of them alone is left to the numbers."""
    name = _name(func)
    is_loss = any(word in name for word in _FUSED_LOSSES)
    return is_loss or name in _ADD_SAMPLES_UP or _torch.is_view(func)


def _indices(func: Any, args: Any) -> list[tuple[int, torch.Tensor]]:
    """Each with the dim of the first argument that it goes into."""
    name = _name(func)
    if name in _LOOK_UP_ROWS:
        return [(dim, x) for dim, x in enumerate(args[1]) if x is not None]
    if name in _LOOK_UP_ALONG_A_DIM:
        return [(args[1] % max(args[0].dim(), 1), args[2])]
    return [(0, args[1])] if name in ("embedding", "take") else []


def _is_routed(func: Any) -> bool:
    """Products of rows that are sorted by expert, with the ends of groups as a third argument.

    The expert of a row is its own choice, wherever the groups end.
    """
    return "grouped_mm" in _name(func)


def _reads_shapes_alone(func: Any) -> bool:
    name = _name(func)
    return name.startswith("new_") or name.endswith("_like")


def _name(func: Any) -> str:
    """``aten.add_.Tensor`` is an ``add``."""
    return str(func).split(".")[1].rstrip("_")


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in _torch.tree_leaves(values) if isinstance(x, torch.Tensor)]


def _is_users_own() -> bool:
    """Whether autograd calls an operator by way of code that is not torch's."""
    for frame, _ in traceback.walk_stack(None):
        if _torch.is_engine(frame):
            return False
        if is_users(frame.f_code.co_filename):
            return True
    return False


def _place() -> str:
    """The innermost line that is not torch's own."""
    for frame, line in traceback.walk_stack(None):
        if is_users(frame.f_code.co_filename):
            return f" ({short_file(frame.f_code.co_filename)}:{line})"
    return ""
