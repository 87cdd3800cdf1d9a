"""Operator check for losses that couple samples: aggregates over samples may only be added up.

The loss is not a mean over samples if, for example, its divisor is computed from the batch, a batch
mean is subtracted, or it has class weights. Comparing numbers may miss this, if the given samples
happen to agree. So the operators are checked too. The loss runs on fake tensors with a prime number
of samples that divides no size of the step: a dim whose size is a multiple of it holds samples. A
value that depends on the batch and has no such dim is an aggregate, and may reach the loss only
through linear operators.

Operators that mix samples and keep their dim are refused if their effect is known: a shift or sort
along that dim, or rows indexed by a random draw. Others, such as an expert's lookup of rows by
indices from the batch, are left to the comparison of numbers: see capture/batch/splitting.py.
"""

import itertools
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.eager_baseline import fake_step
from steelyard.capture.tracing.fake_execution import StorageWatch
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.source_lines import is_user_file, short_file
from steelyard.errors import CaptureRefused
from steelyard.ir.graph import Graph

_SUMS = ("add", "sub", "rsub", "neg", "sum", "mean", "cat", "stack", "clone", "_unsafe_view")
_PRODUCTS = ("mul", "mm", "bmm", "mv", "dot")
_QUOTIENTS = ("aten.div.Tensor", "aten.div_.Tensor", "aten.div.Scalar", "aten.div_.Scalar")
_SUM_SAMPLES = ("sum", "mean", "mm", "bmm", "mv", "dot", "index_add", "scatter_add")
_SELECT = {"where": 0, "masked_fill": 1, "index_put": 1}  # positions of the mask or index argument
_FUSED_LOSSES = ("loss", "binary_cross_entropy")
_ALONG_A_DIM = (
    *("_softmax", "_log_softmax", "logcumsumexp", "cumsum", "cumprod", "cummax", "cummin"),
    *("flip", "roll"),
)
_SORT = ("sort", "topk")
_INDEX_ROWS = ("index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl")
_INDEX_ALONG_A_DIM = (
    *("gather", "scatter", "scatter_add", "scatter_reduce"),
    *("index_select", "index_copy", "index_add", "index_reduce", "index_fill"),
)


def coupling(model: nn.Module, loss: Loss, batch: Any, graph: Graph) -> str:
    """Return a description of the place where samples are coupled; empty if no operator shows
    it.
    """
    samples = _number_of_samples(graph)
    try:
        with fake_step(model, batch) as (mode, parameters, fake_batch), mode, _torch.quiet_logs():
            return _track(model, loss, fake_batch, samples, [*parameters.values()])
    except CaptureRefused as error:
        return f"with {samples} samples {error.happened}"


def _number_of_samples(graph: Graph) -> int:
    """Return a number of samples that divides no size of the graph.

    It is a prime, so that no product of sizes is a multiple of it. It is small, because some losses
    loop over samples.
    """
    sizes = {size for node in graph.nodes for t in node.outputs for size in t.shape if size}
    primes = (n for n in itertools.count(101, 2) if all(n % d for d in range(3, n, 2)))
    return next(n for n in primes if all(size % n for size in sizes))


def _track(
    model: nn.Module, loss: Loss, batch: Any, samples: int, parameters: Sequence[nn.Parameter]
) -> str:
    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.new_empty((samples, *leaf.shape[1:]))

    batch = _torch.tree_map(resized, batch)
    tracker = _Follower(_tensors(batch), samples)
    with StorageWatch(_tensors(batch), on_call=tracker.follow, on_death=tracker.forget):
        value = loss(model, batch)
        reason = tracker.reason_of(value)
        if not reason:
            tracker.is_in_backward = True
            value.backward()
    gradients = [p.grad for p in parameters if p.grad is not None]
    return reason or next(filter(None, map(tracker.reason_of, gradients)), "")


class _Follower:
    """Tracks the storages that depend on the batch, each with the coupling found upstream of it.

    Tracks storages rather than tensors, so that a write through one view marks all views.
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
        inputs = [x for x in read if _torch.storage_key(x) in self._reasons]
        results = _tensors(result)
        if _reads_only_shapes(func):
            inputs = []
        if _torch.draws(func, args, kwargs):
            # A draw with weights from the batch gives integers (indices). Floats come from dropout
            # on the batch, which is not a random index.
            is_drawn = not inputs or not any(x.is_floating_point() for x in results)
        else:
            is_drawn = any(map(self._is_drawn, read)) and all(map(self._is_drawn, inputs))
        if is_drawn:
            self._drawn.update(map(_torch.storage_key, results))
        if not inputs or not results:
            return
        upstream_reason = next(filter(None, map(self.reason_of, inputs)), "")
        # If an operator does not couple samples, neither does its derivative. A user's own code in
        # the backward pass may do so, for example by clipping to the norm of the gradient.
        is_checked = not self.is_in_backward or _is_user_code()
        reason = upstream_reason or (
            self._reason(func, args, kwargs, inputs, results) if is_checked else ""
        )
        for tensor in results:
            key = _torch.storage_key(tensor)
            self._reasons[key] = self._reasons.get(key) or reason

    def _reason(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> str:
        aggregates = [x for x in inputs if not self._dims(x)]
        per_sample = [x for x in results if self._dims(x)]
        if aggregates and (per_sample or not _is_linear(func, args, inputs, results)):
            fault = "combines an aggregate over the batch with single samples"
        elif not aggregates and not per_sample and not _sums_samples(func):
            fault = "reduces all samples to one value"
        elif any(self._pairs_samples(x) for x in per_sample):
            fault = "pairs samples"
        elif "batch_norm" in _name(func) and self._dims(args[0]) not in ({0}, {1}):
            # With samples in dim 0 these are ordinary batch statistics, which the caller handles.
            # With samples in dim 1 each sample has its own statistics.
            fault = "computes statistics over samples"
        elif _name(func) in _ALONG_A_DIM and self._runs_along_samples(func, args, kwargs):
            fault = "runs along the samples"
        elif _name(func) in _SORT and self._sorts_samples(func, args, kwargs):
            fault = "sorts samples"
        elif self._indexes_randomly(func, args):
            fault = "indexes samples at random"
        else:
            return ""
        return f"{_name(func)} {fault}{_user_line()}: samples are not independent"

    def _dims(self, tensor: torch.Tensor) -> set[int]:
        """Return the dims that hold samples."""
        return {d for d, size in enumerate(tensor.shape) if size and size % self._samples == 0}

    def _pairs_samples(self, tensor: torch.Tensor) -> bool:
        dims = self._dims(tensor)
        return len(dims) > 1 or any(tensor.shape[d] % self._samples**2 == 0 for d in dims)

    def _runs_along_samples(self, func: Any, args: Any, kwargs: Any) -> bool:
        dims = _torch.argument(func, args, kwargs, "dim", "dims")
        dims = dims if isinstance(dims, (list, tuple)) else (dims,)
        dims = dims or range(args[0].dim())  # a roll of all elements
        return any(d % args[0].dim() in self._dims(args[0]) for d in dims)

    def _sorts_samples(self, func: Any, args: Any, kwargs: Any) -> bool:
        """True for a sort of floats over samples; integers (expert indices, say) may be sorted."""
        return args[0].is_floating_point() and self._runs_along_samples(func, args, kwargs)

    def _indexes_randomly(self, func: Any, args: Any) -> bool:
        dims = self._dims(args[0]) if isinstance(args[0], torch.Tensor) else ()
        return any(self._is_drawn(x) for dim, x in _indices(func, args) if dim in dims)

    def _is_drawn(self, tensor: torch.Tensor) -> bool:
        return _torch.storage_key(tensor) in self._drawn


def _is_linear(
    func: Any, args: Any, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> bool:
    """True for a sum, or a product or selection with a value that is independent of the batch."""
    name = _name(func)
    if name in ("_to_copy", "copy"):
        return all(x.is_floating_point() or x.is_complex() for x in results)
    if name in _PRODUCTS or str(func) in _QUOTIENTS:
        return len(inputs) == 1 and (name in _PRODUCTS or inputs[0] is args[0])
    if name in _SELECT:
        return not any(x is y for x in _tensors(args[_SELECT[name]]) for y in inputs)
    return _torch.is_view(func) or name in _SUMS


def _sums_samples(func: Any) -> bool:
    """True if the operator sums over samples; the numerical check covers those that select
    samples.
    """
    name = _name(func)
    is_loss = any(word in name for word in _FUSED_LOSSES)
    return is_loss or name in _SUM_SAMPLES or _torch.is_view(func)


def _indices(func: Any, args: Any) -> list[tuple[int, torch.Tensor]]:
    """Return the index tensors of a lookup, each with the dim that it indexes in the first
    argument.
    """
    name = _name(func)
    if name in _INDEX_ROWS:
        return [(dim, x) for dim, x in enumerate(args[1]) if x is not None]
    if name in _INDEX_ALONG_A_DIM:
        return [(args[1] % max(args[0].dim(), 1), args[2])]
    return [(0, args[1])] if name in ("embedding", "take") else []


def _is_routed(func: Any) -> bool:
    """True for grouped matmuls of rows sorted by expert, whose third argument has the group ends.

    The group ends do not couple samples: each row chooses its own expert.
    """
    return "grouped_mm" in _name(func)


def _reads_only_shapes(func: Any) -> bool:
    name = _name(func)
    return name.startswith("new_") or name.endswith("_like")


def _name(func: Any) -> str:
    """Return the base name of an operator: ``add`` for ``aten.add_.Tensor``."""
    return str(func).split(".")[1].rstrip("_")


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in _torch.tree_leaves(values) if isinstance(x, torch.Tensor)]


def _is_user_code() -> bool:
    """True if user code, rather than autograd itself, calls the operator in the backward pass."""
    for frame, _ in traceback.walk_stack(None):
        if _torch.is_engine(frame):
            return False
        if is_user_file(frame.f_code.co_filename):
            return True
    return False


def _user_line() -> str:
    """Return the innermost line of user code, in parentheses."""
    for frame, line in traceback.walk_stack(None):
        if is_user_file(frame.f_code.co_filename):
            return f" ({short_file(frame.f_code.co_filename)}:{line})"
    return ""
