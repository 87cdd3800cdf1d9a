"""Sharding strategies of an operator: DTensor's own rules, and ours where it has none.

These are pure functions from shapes to strategies; they need no mesh and no process group. Our own
rules are in extra_sharding_rules.py; for views, ir/placement.py maps shards in groups. Not for
choosing a strategy: see partition.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from steelyard import _torch
from steelyard.capture.spmd.extra_sharding_rules import (
    CONTIGUOUS_SHARDS_ONLY,
    RULES,
    Pairs,
    argument_dim,
)
from steelyard.ir.graph import Argument, Node, Ref, Tensor
from steelyard.ir.placement import (
    PARTIAL,
    REPLICATE,
    Placement,
    Shard,
    Strategy,
    fits,
    groups_of,
    seen_through,
)
from steelyard.operators import live, operator_named


def strategies(
    node: Node, takes: Sequence[Tensor], *, known: Sequence[Placement], num_ranks: int
) -> tuple[Strategy, ...]:
    """Return the sharding strategies of a call; the first one replicates everything.

    ``takes`` are the input tensors in the order of the call's arguments. ``known`` are placements
    that inputs have or the result should have; strategies with their numbers of groups are added.
    """
    count = results(node)
    whole = Strategy(takes=(REPLICATE,) * len(takes), gives=(REPLICATE,) * count)
    if not takes or node.is_random or node.mutates:
        return (whole,)
    if node.op in VIEWS:
        pairs = _view_strategies(node, takes[0], known, num_ranks)
    else:
        base = (
            RULES[node.op](node, takes) if node.op in RULES else _dtensor_rules(node, takes, count)
        )
        pairs = [
            (_with_groups(inputs, groups), _with_groups(outputs, groups))
            for inputs, outputs in base
            for groups in ((1,) if node.op in CONTIGUOUS_SHARDS_ONLY else groups_of(known))
        ]
        pairs += _grouped_strategies(node, takes, known)
    found = [whole]
    for inputs, outputs in pairs:
        if all(fits(t, p, num_ranks) for t, p in zip(takes, inputs, strict=True)):
            outputs = outputs if len(outputs) == count else tuple(outputs) * count
            found.append(Strategy(takes=tuple(inputs), gives=tuple(outputs)))
    return tuple(dict.fromkeys(found))


def tensors_of(node: Node) -> tuple[str, ...]:
    """Return the names of the input tensors in the order of the arguments, with repetitions."""
    found: list[str] = []

    def collect(argument: Argument) -> None:
        if isinstance(argument, Ref):
            found.append(argument.name)
        elif isinstance(argument, tuple):
            for part in argument:
                collect(part)

    for argument in (*node.args, *(a for _, a in node.kwargs)):
        collect(argument)
    return tuple(found)


def results(node: Node) -> int:
    """Return the number of results of a call, including those its output mask leaves out."""
    operator = operator_named(node.op)
    if not isinstance(operator, _torch.OpOverload):
        return 1
    returns = len(operator._schema.returns)
    return returns if returns > 1 else len(node.outputs)


def _with_groups(placements: Sequence[Placement], groups: int) -> tuple[Placement, ...]:
    return tuple(Shard(p.dim, groups) if isinstance(p, Shard) else p for p in placements)


def _dtensor_rules(node: Node, takes: Sequence[Tensor], count: int) -> Pairs:
    operator = operator_named(node.op)
    if not isinstance(operator, _torch.OpOverload):
        return []
    tensors = iter(takes)

    def meta_of(argument: Argument) -> Any:
        if isinstance(argument, Ref):
            tensor = next(tensors)
            return _torch.MetaTensor(tensor.shape, tensor.stride, getattr(torch, tensor.dtype))
        if isinstance(argument, tuple):
            return [meta_of(a) for a in argument]
        return live(argument, {})

    args = [meta_of(a) for a in node.args]
    kwargs = {key: meta_of(a) for key, a in node.kwargs}
    pairs: Pairs = []
    for words in _torch.dtensor_strategies(operator, args, kwargs):
        if len(words) == count + len(takes) and all(word in _PLACEMENT_OF for word, _ in words):
            placements = [_PLACEMENT_OF[word](dim) for word, dim in words]
            pairs.append((placements[count:], placements[:count]))
    return pairs


_PLACEMENT_OF: dict[str, Callable[[int], Placement]] = {
    "whole": lambda _: REPLICATE,
    "sum": lambda _: PARTIAL,
    "shard": Shard,
}


# --- views


def _view_strategies(
    node: Node, source: Tensor, known: Sequence[Placement], num_ranks: int
) -> Pairs:
    pairs: Pairs = [((PARTIAL,), (PARTIAL,))]
    shape, viewed = source.shape, node.outputs[0].shape
    for dim in range(len(shape)):
        for groups in groups_of(known):
            shard = Shard(dim, groups)
            if fits(source, shard, num_ranks):
                seen = seen_through(shape, viewed, shard, num_ranks)
                if seen is not None:
                    pairs.append(((shard,), (seen,)))
    return pairs


def _grouped_strategies(node: Node, takes: Sequence[Tensor], known: Sequence[Placement]) -> Pairs:
    """Return strategies for a split or cat along a dim that is sharded in groups."""
    is_split, is_joined = node.op in SPLITS, node.op == "aten.cat.default"
    if not is_split and not is_joined:
        return []
    dim = argument_dim(node, 2 if is_split else 1, len(takes[0].shape))
    pieces = node.outputs if is_split else takes
    if len({piece.shape for piece in pieces}) > 1:
        return []
    pairs: Pairs = []
    for groups in groups_of(known):
        if is_joined:
            joined = Shard(dim, groups * len(pieces))
            pairs.append(((Shard(dim, groups),) * len(pieces), (joined,)))
        elif groups % len(pieces) == 0:
            part = Shard(dim, groups // len(pieces))
            pairs.append(((Shard(dim, groups),), (part,) * len(pieces)))
    return pairs


SPLITS = frozenset({"aten.split.Tensor", "aten.split_with_sizes.default"})
VIEWS = frozenset({
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default",
})  # fmt: skip
