"""A live model of which this rank holds parts: cut, and put together again from all ranks.

Between steps a parameter is its part, ``parameter.data`` a smaller tensor: the optimizer, its state
and gradients follow. Not for what a step computes with parts: that is its program.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from steelyard.ir.placement import Shard, local_shape, local_stride

_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """How a tensor lies on the ranks of a group, and which of them this is."""

    shard: Shard
    num_ranks: int
    rank: int
    group: dist.ProcessGroup

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part, in memory in the order in which the whole is."""
        shape = local_shape(tuple(whole.shape), self.shard, self.num_ranks)
        stride = local_stride(tuple(whole.shape), whole.stride(), shape)
        part = torch.empty_strided(shape, stride, dtype=whole.dtype, device=whole.device)
        return part.copy_(self._apart(whole).select(self.shard.dim + 1, self.rank).reshape(shape))

    def whole_of(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Fill ``whole`` from all ranks' parts; all of them call this."""
        flat = part.contiguous()
        parts = [torch.empty_like(flat) for _ in range(self.num_ranks)]
        dist.all_gather(parts, flat, group=self.group)
        places = self._apart(whole)
        for rank, held in enumerate(parts):
            place = places.select(self.shard.dim + 1, rank)
            place.copy_(held.reshape(place.shape))
        return whole

    def _apart(self, whole: torch.Tensor) -> torch.Tensor:
        """With the cut dim as three: groups, ranks, what is one rank's of one group."""
        sizes = self.shard.groups, self.num_ranks, -1
        apart: torch.Tensor = whole.unflatten(self.shard.dim, sizes)
        return apart


class ShardedTensors:
    """``ways`` says of which of the model's tensors this rank keeps a part, by their names in a
    graph, and of which a part of a part; cutting happens here."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], ways: Mapping[str, Sequence[ShardSpec]]
    ) -> None:
        self._held = [tensors[name] for name in ways]
        self._ways = {id(tensors[name]): tuple(way) for name, way in ways.items()}
        self._forms = {id(t): (t.shape, t.stride()) for t in self._held}
        for tensor in self._held:
            tensor.grad = None
            tensor.data = self._cut(tensor, tensor.data)

    @contextlib.contextmanager
    def whole(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Within it all ranks hold all of the model, and of what the optimizer keeps; what is then
        written into them is kept. Gradients are not there. All ranks enter together."""
        with self._set_aside() as parts:
            for tensor in self._held:
                tensor.data = self._gathered(tensor, parts[id(tensor)])
            self._change_state(optimizer, parts, self._gathered)
            try:
                yield
            finally:
                wholes = {id(t): t.data for t in self._held}
                for tensor in self._held:
                    parts[id(tensor)].copy_(self._cut(tensor, tensor.data))
                self._change_state(optimizer, wholes, self._cut)

    @contextlib.contextmanager
    def imagined(self) -> Iterator[None]:
        """Within it tensors have the forms of whole ones and no values, for tracing."""
        with self._set_aside():
            for tensor in self._held:
                shape, stride = self._forms[id(tensor)]
                tensor.data = tensor.new_empty_strided(shape, stride)
            yield

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[dict[int, torch.Tensor]]:
        """Parts and their gradients, while something else is in their place."""
        parts = {id(t): t.data for t in self._held}
        gradients = [(t, t.grad) for t in self._held]
        for tensor in self._held:
            tensor.grad = None
        try:
            yield parts
        finally:
            for tensor, gradient in gradients:
                tensor.data = parts[id(tensor)]
                tensor.grad = gradient

    def _change_state(
        self,
        optimizer: torch.optim.Optimizer | None,
        weights: Mapping[int, torch.Tensor],
        change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """Of what the optimizer keeps, all that has the form of the weight that it is kept for."""
        if optimizer is None:
            return
        # In the order of the model, which is that of all ranks.
        for parameter in self._held:
            kept = optimizer.state.get(parameter, {})
            for key in sorted(kept):
                value, weight = kept[key], weights[id(parameter)]
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == weight.shape:
                    kept[key] = change(parameter, value)

    def _gathered(self, tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """From the innermost part outwards; each whole is as its part is cut from it."""
        forms = [self._forms[id(tensor)]]
        for way in self._ways[id(tensor)][:-1]:
            shape, stride = forms[-1]
            local = local_shape(tuple(shape), way.shard, way.num_ranks)
            forms.append((torch.Size(local), local_stride(tuple(shape), stride, local)))
        for way, (shape, stride) in zip(reversed(self._ways[id(tensor)]), reversed(forms)):
            part = way.whole_of(part, part.new_empty_strided(shape, stride))
        return part

    def _cut(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        for way in self._ways[id(tensor)]:
            whole = way.part_of(whole)
        return whole


def why_unparted(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> str:
    """Why the optimizer's step is another on parts of parameters; empty where it is the same.

    Tried on small ones: what it does to an element may hang on the others.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            same = all(_is_same_on_parts(make, dim) for dim in (0, 1))
        except Exception as error:  # noqa: BLE001 - an optimizer may fail in its own way
            return f"the optimizer fails on a small parameter ({type(error).__name__})"
    return "" if same else "the optimizer's step is another on a part of a parameter"


def _is_same_on_parts(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], dim: int
) -> bool:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 6, generator=generator, device="cpu", dtype=torch.float64)
    gradients = torch.randn(_STEPS, 4, 6, generator=generator, device="cpu", dtype=torch.float64)
    halves = zip(whole.chunk(2, dim), gradients.chunk(2, dim + 1))
    parts = [_after_steps(make, half, own) for half, own in halves]
    return torch.allclose(_after_steps(make, whole, gradients), torch.cat(parts, dim))


def _after_steps(make: Any, value: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    parameter = nn.Parameter(value.clone())
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()
