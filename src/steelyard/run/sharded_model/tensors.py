"""A live model whose tensors are sharded over ranks, and can be gathered from all ranks.

Between steps ``parameter.data`` is this rank's shard: gradients and optimizer state have its shape.
Not for computing with shards, which is the task of a step's program.
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
    """The sharding of a tensor over a group, and this rank's place in it."""

    shard: Shard
    num_ranks: int
    rank: int
    group: dist.ProcessGroup

    def local_shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's shard, with the dim order that the whole has in memory."""
        shape = local_shape(tuple(whole.shape), self.shard, self.num_ranks)
        stride = local_stride(tuple(whole.shape), whole.stride(), shape)
        part = torch.empty_strided(shape, stride, dtype=whole.dtype, device=whole.device)
        return part.copy_(
            self._split_dim(whole).select(self.shard.dim + 1, self.rank).reshape(shape)
        )

    def gather(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Fill ``whole`` from the shards of all ranks; all ranks must call this."""
        flat = part.contiguous()
        parts = [torch.empty_like(flat) for _ in range(self.num_ranks)]
        dist.all_gather(parts, flat, group=self.group)
        places = self._split_dim(whole)
        for rank, shard in enumerate(parts):
            place = places.select(self.shard.dim + 1, rank)
            place.copy_(shard.reshape(place.shape))
        return whole

    def _split_dim(self, whole: torch.Tensor) -> torch.Tensor:
        """Split the sharded dim into three: groups, ranks, and the elements of one rank in one
        group."""
        sizes = self.shard.groups, self.num_ranks, -1
        split: torch.Tensor = whole.unflatten(self.shard.dim, sizes)
        return split


class ShardedTensors:
    """Shards tensors of the model. ``specs`` gives the sharding of each tensor by its name in the
    graph; if a tensor has several specs, the first one is the outermost.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, Sequence[ShardSpec]]
    ) -> None:
        self._sharded = [tensors[name] for name in specs]
        self._specs = {id(tensors[name]): tuple(spec) for name, spec in specs.items()}
        self._forms = {id(t): (t.shape, t.stride()) for t in self._sharded}
        for tensor in self._sharded:
            tensor.grad = None
            tensor.data = self._shard(tensor, tensor.data)

    @contextlib.contextmanager
    def whole(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Within this context, all ranks have the whole model and optimizer state; all ranks must
        enter it.

        Changes persist. Gradients are not available.
        """
        with self._shards_set_aside() as parts:
            for tensor in self._sharded:
                tensor.data = self._unshard(tensor, parts[id(tensor)])
            self._change_state(optimizer, parts, self._unshard)
            try:
                yield
            finally:
                wholes = {id(t): t.data for t in self._sharded}
                for tensor in self._sharded:
                    parts[id(tensor)].copy_(self._shard(tensor, tensor.data))
                self._change_state(optimizer, wholes, self._shard)

    @contextlib.contextmanager
    def imagined(self) -> Iterator[None]:
        """Within this context, tensors have their full shapes and no values, for tracing."""
        with self._shards_set_aside():
            for tensor in self._sharded:
                shape, stride = self._forms[id(tensor)]
                tensor.data = tensor.new_empty_strided(shape, stride)
            yield

    @contextlib.contextmanager
    def _shards_set_aside(self) -> Iterator[dict[int, torch.Tensor]]:
        """Save shards and gradients while other data replaces them, and restore them on exit."""
        parts = {id(t): t.data for t in self._sharded}
        gradients = [(t, t.grad) for t in self._sharded]
        for tensor in self._sharded:
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
        """Apply ``change`` to the optimizer state that has the shape of its weight."""
        if optimizer is None:
            return
        # Parameters are in the order of the model, which is the same on all ranks.
        for parameter in self._sharded:
            state = optimizer.state.get(parameter, {})
            for key in sorted(state):
                value, weight = state[key], weights[id(parameter)]
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == weight.shape:
                    state[key] = change(parameter, value)

    def _unshard(self, tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Gather from the innermost shard outwards; each intermediate has the layout that it had
        before it was sharded.
        """
        forms = [self._forms[id(tensor)]]
        for spec in self._specs[id(tensor)][:-1]:
            shape, stride = forms[-1]
            local = local_shape(tuple(shape), spec.shard, spec.num_ranks)
            forms.append((torch.Size(local), local_stride(tuple(shape), stride, local)))
        for spec, (shape, stride) in zip(reversed(self._specs[id(tensor)]), reversed(forms)):
            part = spec.gather(part, part.new_empty_strided(shape, stride))
        return part

    def _shard(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        for spec in self._specs[id(tensor)]:
            whole = spec.local_shard(whole)
        return whole


def why_unshardable(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> str:
    """Return why the optimizer's step differs on shards of parameters; empty if it does not.

    This is tried on small parameters, because an element's update may depend on other elements.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            same = all(_is_same_on_shards(make, dim) for dim in (0, 1))
        except Exception as error:  # noqa: BLE001 - an optimizer may fail in its own way
            return f"the optimizer fails on a small parameter ({type(error).__name__})"
    return "" if same else "the optimizer's step gives other results on a shard of a parameter"


def _is_same_on_shards(
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
