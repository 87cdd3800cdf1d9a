"""Operators by name: what a graph calls ``aten.add.Tensor``, as something to call.

Also the few operators of our own that capture puts into a graph. Not for deciding which.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from steelyard.core.graph import Argument, Node, Ref, Symbol

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

    def live(argument: Argument) -> Any:
        match argument:
            case Ref(name):
                return values[name]
            case Symbol(text):
                return torch_object(text)
            case tuple():
                return [live(a) for a in argument]
        return argument

    args = [live(a) for a in node.args]
    if node.is_getitem:
        return args[0][args[1]]
    return operator_named(node.op)(*args, **{k: live(a) for k, a in node.kwargs})


def torch_object(text: str) -> Any:
    """``torch.float32``, ``torch.device('cpu')``: what a Symbol names."""
    if text.startswith("torch.device("):
        return torch.device(ast.literal_eval(text[len("torch.device(") : -1]))
    return getattr(torch, text.removeprefix("torch."))


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

_OWN: dict[str, Operator] = {
    "steelyard.all_gather": all_gather,
    "steelyard.copy_laid_out": copy_laid_out,
}
