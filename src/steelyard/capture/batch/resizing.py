"""Batches of other sizes on the meta device: the same entries with one dim resized.

Not for splitting the given batch: see splitting.py.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from steelyard import _torch
from steelyard.capture.batch.splitting import batch_size
from steelyard.errors import BadInput
from steelyard.ir.graph import Graph, Node
from steelyard.plans.budget import Maximize


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A batch, the dim to resize, and the current size of that dim."""

    batch: Any
    dim: int
    now: int

    def at(self, size: int) -> Any:
        """Return the batch with that dim resized to ``size``, on the meta device."""

        def resized(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            shape = list(leaf.shape)
            for dim in range(self.dim, leaf.dim()) if self.dim else (0,):
                if shape[dim] == self.now:
                    shape[dim] = size
            return torch.empty(shape, dtype=leaf.dtype, device="meta")

        return _torch.tree_map(resized, self.batch)


def sizes_of(batch: Any, maximize: Maximize) -> Sizes:
    if maximize is Maximize.BATCH:
        now = batch_size(batch)
        if now is None:
            raise BadInput(
                "the tensors of the batch do not share dim 0",
                expected="a batch in which every tensor has one row for each sample",
                remedy="plan with batches of the sizes that you consider",
            )
        return Sizes(batch=batch, dim=0, now=now)
    lengths = Counter(
        leaf.shape[1]
        for leaf in _torch.tree_leaves(batch)
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and not leaf.is_floating_point()
    )
    if not lengths:
        raise BadInput(
            "the batch has no sequence: it has no integer tensor with a second dim",
            expected="token ids of shape (batch, sequence)",
            remedy="use --maximize batch",
        )
    return Sizes(batch=batch, dim=1, now=lengths.most_common(1)[0][0])


def impossible(graph: Graph) -> str:
    """Return why eager PyTorch would fail at this size although the shapes fit; else empty.

    Fake tensors have no values, so tracing misses a position beyond the end of a position table.
    Positions are therefore followed here from each arange to the table they index.
    """
    highest: dict[str, int] = {}
    for node in graph.forward():
        bound = _highest(node, highest)
        if bound is not None:
            highest[node.name] = bound
        if node.op.startswith("aten.embedding.") and node.inputs[1] in highest:
            rows = graph.by_name[node.inputs[0]].outputs[0].shape[0]
            if highest[node.inputs[1]] >= rows:
                return f"{node.path or 'an embedding'} has {rows} positions"
    return ""


def _highest(node: Node, known: dict[str, int]) -> int | None:
    """Return the largest value in a tensor of positions, if known operators determine it."""
    numbers = [a for a in node.args if isinstance(a, int) and not isinstance(a, bool)]
    if node.op.startswith("aten.arange.") and numbers:
        end = numbers[0] if node.op.endswith(".default") else numbers[1]
        return end - 1
    if not node.inputs or node.inputs[0] not in known or len(node.inputs) > 1:
        return None
    if node.op.startswith("aten.add.") and numbers:
        return known[node.inputs[0]] + numbers[0]
    copies = ("view", "unsqueeze", "expand", "slice", "_to_copy", "clone", "select", "alias")
    return known[node.inputs[0]] if node.op.split(".")[1] in copies else None
