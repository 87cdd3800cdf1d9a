"""Which placements an operator takes and gives: from DTensor's table, and ours where it has none.

Pure: shapes in, strategies out; no mesh, no process group. Ours are those of
extra_sharding_rules.py, and of views, through which a part of each group is followed (see
ir/placement.py). Not for which strategy is taken: see partition.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from steelyard import _torch
from steelyard.capture.spmd.extra_sharding_rules import BY_ROWS, OWN, Pairs, argument_dim
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
    node: Node, takes: Sequence[Tensor], *, near: Sequence[Placement], num_ranks: int
) -> tuple[Strategy, ...]:
    """What ``node`` may be called on; the first is the whole on every rank.

    ``takes`` are its tensors in the order of its arguments, ``near`` the placements they have.
    """
    count = results(node)
    whole = Strategy(takes=(REPLICATE,) * len(takes), gives=(REPLICATE,) * count)
    if not takes or node.is_random or node.mutates:
        return (whole,)
    if node.op in VIEWS:
        pairs = _viewed(node, takes[0], near, num_ranks)
    else:
        base = OWN[node.op](node, takes) if node.op in OWN else _of_dtensor(node, takes, count)
        pairs = [
            (_grouped(given, groups), _grouped(made, groups))
            for given, made in base
            for groups in ((1,) if node.op in BY_ROWS else groups_of(near))
        ]
        pairs += _in_groups(node, takes, near)
    found = [whole]
    for given, made in pairs:
        if all(fits(t, p, num_ranks) for t, p in zip(takes, given, strict=True)):
            made = made if len(made) == count else tuple(made) * count
            found.append(Strategy(takes=tuple(given), gives=tuple(made)))
    return tuple(dict.fromkeys(found))


def tensors_of(node: Node) -> tuple[str, ...]:
    """The values that a call is given, in the order of its arguments, as often as it names them."""
    found: list[str] = []

    def look(argument: Argument) -> None:
        if isinstance(argument, Ref):
            found.append(argument.name)
        elif isinstance(argument, tuple):
            for part in argument:
                look(part)

    for argument in (*node.args, *(a for _, a in node.kwargs)):
        look(argument)
    return tuple(found)


def results(node: Node) -> int:
    """How many results a call has, those included that it was asked to leave out."""
    operator = operator_named(node.op)
    if not isinstance(operator, _torch.OpOverload):
        return 1
    returns = len(operator._schema.returns)
    return returns if returns > 1 else len(node.outputs)


def _grouped(placements: Sequence[Placement], groups: int) -> tuple[Placement, ...]:
    return tuple(Shard(p.dim, groups) if isinstance(p, Shard) else p for p in placements)


def _of_dtensor(node: Node, takes: Sequence[Tensor], count: int) -> Pairs:
    operator = operator_named(node.op)
    if not isinstance(operator, _torch.OpOverload):
        return []
    given = iter(takes)

    def described(argument: Argument) -> Any:
        if isinstance(argument, Ref):
            tensor = next(given)
            return _torch.MetaTensor(tensor.shape, tensor.stride, getattr(torch, tensor.dtype))
        if isinstance(argument, tuple):
            return [described(a) for a in argument]
        return live(argument, {})

    args = [described(a) for a in node.args]
    kwargs = {key: described(a) for key, a in node.kwargs}
    pairs: Pairs = []
    for words in _torch.dtensor_strategies(operator, args, kwargs):
        if len(words) == count + len(takes) and all(word in _PLAIN for word, _ in words):
            plain = [_PLAIN[word](dim) for word, dim in words]
            pairs.append((plain[count:], plain[:count]))
    return pairs


_PLAIN: dict[str, Callable[[int], Placement]] = {
    "whole": lambda _: REPLICATE,
    "sum": lambda _: PARTIAL,
    "shard": Shard,
}


# --- views


def _viewed(node: Node, source: Tensor, near: Sequence[Placement], num_ranks: int) -> Pairs:
    pairs: Pairs = [((PARTIAL,), (PARTIAL,))]
    shape, viewed = source.shape, node.outputs[0].shape
    for dim in range(len(shape)):
        for groups in groups_of(near):
            shard = Shard(dim, groups)
            if fits(source, shard, num_ranks):
                seen = seen_through(shape, viewed, shard, num_ranks)
                if seen is not None:
                    pairs.append(((shard,), (seen,)))
    return pairs


def _in_groups(node: Node, takes: Sequence[Tensor], near: Sequence[Placement]) -> Pairs:
    """Taking stretches of a dim apart that are groups of a part, and putting them together."""
    is_split, is_joined = node.op in SPLITS, node.op == "aten.cat.default"
    if not is_split and not is_joined:
        return []
    dim = argument_dim(node, 2 if is_split else 1, len(takes[0].shape))
    pieces = node.outputs if is_split else takes
    if len({piece.shape for piece in pieces}) > 1:
        return []
    pairs: Pairs = []
    for groups in groups_of(near):
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
