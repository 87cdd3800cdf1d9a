"""All ranks of a sharded step in one process, call by call, with real numbers: fast, and without
gloo. The exchanges are implemented a second time here. Not for the work of processes: see
tests/system/dist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steelyard import _torch
from steelyard.ir.collective import Exchange
from steelyard.ir.graph import Graph, Node, OutputKind
from steelyard.ir.placement import Partial, Placement, Shard
from steelyard.operators import call

_SEED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The outputs of a step, by kind and target: the loss, gradients and new values of buffers."""

    values: dict[tuple[OutputKind, str], Tensor]

    @property
    def loss(self) -> Tensor:
        return self.values[OutputKind.LOSS, ""]


def given(graph: Graph, model: torch.nn.Module, batch: Any, constants: Any) -> dict[str, Tensor]:
    """The live tensors that the inputs of a whole step stand for."""
    dtype = getattr(torch, graph.by_name["tangent"].outputs[0].dtype)
    values: dict[str, Tensor] = {**constants, "tangent": torch.ones((), dtype=dtype)}
    values |= {f"parameter:{n}": p.detach() for n, p in model.named_parameters()}
    values |= {f"buffer:{n}": b.detach() for n, b in model.named_buffers()}
    for path, leaf in _torch.tree_flatten_with_path(batch)[0]:
        values[f"batch:{_torch.keystr(path)}"] = leaf
    return {node.name: values[node.name] for node in graph.inputs()}


def run(graphs: Sequence[Graph], inputs: Sequence[Mapping[str, Tensor]]) -> list[Left]:
    """Run ``graphs`` of all ranks on the inputs of each; with one rank this is the step itself."""
    torch.manual_seed(_SEED)
    values: list[dict[str, Any]] = [dict(given) for given in inputs]
    for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
        assert len({(n.name, n.waits_for) for n in nodes}) == 1, nodes[0].name
        if nodes[0].is_input:
            continue
        if nodes[0].collective is not None:
            sent = [v[n.inputs[0]] for n, v in zip(nodes, values, strict=True)]
            for at, result in zip(values, _exchanged(nodes[0], sent), strict=True):
                at[nodes[0].name] = result
            continue
        state = torch.get_rng_state()
        for node, at in zip(nodes, values, strict=True):
            torch.set_rng_state(state)
            at[node.name] = at[node.waits_for] if node.waits_for else call(node, at)
            _as_described(node, at[node.name])
    return [
        Left(values={(o.kind, o.target): at[o.node] for o in graph.outputs})
        for graph, at in zip(graphs, values, strict=True)
    ]


def _as_described(node: Node, value: Any) -> None:
    leaves = [t for t in _torch.tree_leaves(value) if isinstance(t, Tensor)]
    shapes = [tuple(t.shape) for t in leaves]
    assert shapes == [t.shape for t in node.outputs], (node.name, node.op, shapes, node.outputs)


def _exchanged(node: Node, sent: list[Tensor]) -> list[Tensor]:
    assert node.collective is not None
    assert all(t.is_contiguous() for t in sent), node.name
    ranks = len(sent)
    match node.collective.kind:
        case Exchange.ALL_REDUCE:
            total = torch.stack(sent).sum(0)
            return [total.clone() for _ in sent]
        case Exchange.ALL_GATHER:
            return [torch.cat(sent) for _ in sent]
        case Exchange.REDUCE_SCATTER:
            return [part.clone() for part in torch.stack(sent).sum(0).chunk(ranks)]
    raise AssertionError(node.collective.kind)


def cut(tensor: Tensor, placement: Placement, rank: int, num_ranks: int) -> Tensor:
    """Return the part of a tensor that a rank holds."""
    assert not isinstance(placement, Partial)
    if not isinstance(placement, Shard):
        return tensor
    groups = tensor.chunk(placement.groups, placement.dim)
    part = torch.cat([g.chunk(num_ranks, placement.dim)[rank] for g in groups], placement.dim)
    return torch.empty_like(part).copy_(part)


def joined(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """Return the tensor of which each rank holds one of these parts."""
    if not isinstance(placement, Shard):
        for part in parts:
            assert torch.equal(part, parts[0]), "ranks differ in what they hold whole"
        return parts[0]
    pieces = [part.chunk(placement.groups, placement.dim) for part in parts]
    return torch.cat([p for group in zip(*pieces, strict=True) for p in group], placement.dim)
