"""Splits the global batch into equal parts, and checks that this trains the same model.

Not for capturing the parts: see capture/step.py.
"""

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.batch.independence_proof import (
    Reduction,
    Sample,
    Splitting,
    compare_with_samples,
    fixed_batch_statistics,
    indivisible,
)
from steelyard.capture.checks.batch_independence import coupling
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.ir.analysis.counted_means import counted_means, is_counted_alone, same_shares
from steelyard.ir.graph import CountedMean, Graph, OutputKind, Ref
from steelyard.operators import call
from steelyard.passes.data_parallel.sync_batchnorm import normalising, why_not_synchronised
from steelyard.plans.plan import BatchEntry


def entries(batch: Any) -> tuple[BatchEntry, ...]:
    leaves = _torch.tree_flatten_with_path(batch)[0]
    return tuple(
        BatchEntry(
            name=_torch.keystr(path),
            shape=tuple(leaf.shape),
            dtype=str(leaf.dtype).removeprefix("torch."),
        )
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    )


def batch_size(batch: Any) -> int | None:
    """Return the size of dim 0 of all tensors; None if they differ."""
    sizes = {
        x.shape[0] if x.dim() else None
        for x in _torch.tree_leaves(batch)
        if isinstance(x, torch.Tensor)
    }
    return sizes.pop() if len(sizes) == 1 else None


def part(batch: Any, *, start: int, size: int) -> Any:
    """Return rows ``start`` to ``start + size`` of every tensor, as views."""

    def narrowed(leaf: Any) -> Any:
        return leaf.narrow(0, start, size) if isinstance(leaf, torch.Tensor) else leaf

    return _torch.tree_map(narrowed, batch)


def splitting(
    model: nn.Module, loss: Loss, batch: Any, graph: Graph, *, at_once: bool = False
) -> Splitting:
    """Check that the loss of the batch is the mean or the sum of the losses of its parts.

    First checks the operators, then compares numbers: the live model runs on a few samples, as one
    batch and one by one, with random draws replaced by their expectations. ``at_once`` means that
    ranks compute the parts at the same time. They can then share batch statistics, so these do not
    prevent splitting.
    """
    size = batch_size(batch)
    if size is None:
        return indivisible("the tensors of the batch do not share dim 0")
    if size < 2:
        return indivisible("the batch is a single sample")
    reason = why_indivisible(model, loss, batch, graph, at_once=at_once)
    if reason:
        return indivisible(reason)
    leaves = (x for x in _torch.tree_leaves(batch) if isinstance(x, torch.Tensor))
    if any(t.device.type == "meta" for t in (*model.parameters(), *leaves)):
        return indivisible("independence of samples cannot be checked without values (meta device)")
    counted = [c for mean in counted_means(graph) if (c := _counts(graph, mean, batch))]
    every = counted[0] if counted else [1] * size
    if any(not same_shares(every, other) for other in counted):
        return indivisible("two means in the loss count targets of different samples")
    if sum(n > 0 for n in every) < 2:
        return indivisible(
            "fewer than two samples hold a counted target, so splitting the batch cannot be checked"
        )
    if len(set(every)) > 1 and not is_counted_alone(graph):
        return indivisible(
            "samples have different numbers of counted targets, and the loss has another term"
        )
    rows = _rows_to_compare(every)
    with fixed_batch_statistics() if at_once else contextlib.nullcontext():
        samples = [Sample(batch=_rows(batch, [row]), count=every[row]) for row in rows]
        is_low = computes_in_half(graph)
        verdict = compare_with_samples(model, loss, _rows(batch, rows), samples, is_low=is_low)
    if verdict.reduction is Reduction.MEAN and is_counted_alone(graph):
        return replace(verdict, reduction=Reduction.COUNTED)
    return verdict


def why_indivisible(
    model: nn.Module, loss: Loss, batch: Any, graph: Graph, *, at_once: bool = False
) -> str:
    """Return why splitting the batch would change the training result, judged by the operators
    alone.

    The result is empty if no operator shows it. Without values (meta device) this is the only
    check.
    """
    statistics = normalising(graph)
    if statistics and not at_once:
        return f"BatchNorm in {statistics[0].path} computes its statistics over the whole batch"
    if reason := why_not_synchronised(graph):
        return reason
    for output in graph.outputs:
        if output.kind is OutputKind.UPDATE and not (
            at_once and _is_equal_on_ranks(graph, output.node)
        ):
            name = output.target.removeprefix("buffer:")
            return (
                f"buffer {name} is updated in every pass, and each part of the batch would update "
                "it again"
            )
    for name, parameter in model.named_parameters():
        if _torch.any_hooks([parameter]):
            return f"parameter {name} has a hook, which would run once for each part"
    return (
        _counted_by_more_than_the_batch(graph)
        or _weighed_by_class(graph)
        or _scaled_by_frequency(graph)
        or coupling(model, loss, batch, graph)
    )


def _is_equal_on_ranks(graph: Graph, update: str) -> bool:
    """True if all ranks compute the same new buffer value.

    This holds if the value does not depend on a random draw, and depends on the batch only through
    statistics of all samples.
    """
    taking = {node.name for node in normalising(graph)}
    pending, seen = [update], set[str]()
    while pending:
        node = graph.by_name[pending.pop()]
        # The first result is the normalised input: it depends on the rank's own samples.
        is_statistic = node.is_getitem and node.inputs[0] in taking and node.args[1] != 0
        if node.name in seen or is_statistic:
            continue
        seen.add(node.name)
        if node.is_random or node.name.startswith("batch:"):
            return False
        pending += node.inputs
    return True


def _rows_to_compare(counts: list[int]) -> list[int]:
    """Choose four samples to compare, at least two of them with targets that count."""
    rows = _spread_rows([*range(len(counts))], 4)
    if sum(counts[row] > 0 for row in rows) >= 2:
        return rows
    without = [row for row in rows if not counts[row]]
    return sorted([*_spread_rows([row for row, n in enumerate(counts) if n], 3), without[0]])


def _spread_rows(rows: list[int], wanted: int) -> list[int]:
    """Choose rows spread over the batch: batches are often sorted, so that neighbours are
    similar.
    """
    last = len(rows) - 1
    return [rows[i] for i in sorted({round(k * last / (wanted - 1)) for k in range(wanted)})]


def _rows(batch: Any, rows: list[int]) -> Any:
    def chosen(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, torch.Tensor) else leaf

    return _torch.tree_map(chosen, batch)


def _counted_by_more_than_the_batch(graph: Graph) -> str:
    """Return why the targets cannot be counted before the step; empty if they can.

    A random draw would differ from the step's own, and model outputs are not known yet.
    """
    made = [name for mean in counted_means(graph) for name in graph.ancestors(mean.targets)]
    for node in map(graph.by_name.__getitem__, made):
        where = f" ({node.line})" if node.line else ""
        if node.is_random:
            return f"the targets that the loss counts are drawn at random{where}"
        if any(name.startswith("parameter:") for name in node.inputs):
            return f"the targets that the loss counts depend on the model's output{where}"
    return ""


def _weighed_by_class(graph: Graph) -> str:
    """Return a reason if the loss is a mean with class weights, which depend on the batch."""
    weighed = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
    for node in graph.forward():
        if node.op in weighed and isinstance(node.args[2], Ref) and node.args[3] == _MEAN:
            return "the loss is normalized by the class weights in the batch"
    return ""


_MEAN = 1  # the number of this reduction in ATen


def _scaled_by_frequency(graph: Graph) -> str:
    """Return a reason if an embedding scales gradients by the frequency of indices in the batch.

    Comparing numbers can miss this: only gradients of samples that share an index differ.
    """
    for node in graph.forward():
        # scale_grad_by_freq, in both operators
        if "embedding" in node.op and node.args[3:4] == (True,):
            where = node.path or node.line
            return f"{where} divides gradients by the frequency of each index in the batch"
    return ""


def _counts(graph: Graph, counted: CountedMean, batch: Any) -> list[int]:
    """Return the number of counted targets per sample; empty if the batch alone does not tell."""
    values: dict[str, Any] = {
        f"batch:{_torch.keystr(path)}": leaf
        for path, leaf in _torch.tree_flatten_with_path(batch)[0]
    }
    for name in graph.ancestors(counted.targets):
        node = graph.by_name[name]
        if not set(node.inputs) <= values.keys():
            return []  # the targets depend on more than the batch
        values[name] = call(node, values)
    targets = values[counted.targets]
    size = batch_size(batch)
    assert size is not None
    counts: list[int] = (targets.reshape(size, -1) != counted.ignored).sum(1).tolist()
    return counts


def computes_in_half(graph: Graph) -> bool:
    """True if any value of a step is in half precision, by autocast or by its parameters."""
    half = ("float16", "bfloat16")
    return any(t.dtype in half for node in graph.nodes for t in node.outputs)
