"""The DistributedDataParallel communication hook: chooses the gradients of a bucket to compress
and keeps their error-feedback residuals.

Not for the compressed reductions: see compressed_reduce.py.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from steelyard.errors import Mismatch
from steelyard.hooks.background import BackgroundWork, Came
from steelyard.hooks.bucket_state import BucketState
from steelyard.hooks.compressed_reduce import CompressedReduce
from steelyard.ir.gradient_codec import START, Codec, are_worth_factors
from steelyard.operators.low_rank import first_start

# Compressing a smaller gradient saves next to nothing.
_LEAST_BYTES = 4096


class Buckets:
    """Reduces DDP's buckets one after another, in the background of the backward pass."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        codec: Codec,
        sums: CompressedReduce,
        group: dist.ProcessGroup,
        scaler: Any,
        background: BackgroundWork,
        *,
        may_be_unused: bool,
    ) -> None:
        self._parameters = dict(parameters)
        self._names = {id(p): name for name, p in parameters.items()}
        self._codec, self._sums, self._group, self._scaler = codec, sums, group, scaler
        self._background, self._may_be_unused = background, may_be_unused
        self._residuals = BucketState(
            room=sums.room, first=partial(torch.zeros, dtype=torch.float32)
        )
        self._starts = BucketState(room=lambda numel: numel, first=first_start)
        self._scale = self._scale_now = 1.0

    def send(
        self,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        *,
        is_first: bool,
    ) -> Came:
        """Replace the buffer's gradients by their mean over the ranks."""
        names = [self._names[id(p)] for p in parameters]
        if is_first and self._scaler:  # first bucket of a backward pass; synchronizes a GPU
            self._scale_now = self._scaler.get_scale()
        scale = self._scale_now

        def work() -> None:
            with torch.no_grad():
                self._reduce(dict(zip(names, gradients, strict=True)), scale)

        return self._background.do(work, buffer)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the residual of each parameter by name, summed over all ranks, and the initial
        right factors, which are equal on all ranks. This is a collective: every rank must call it.
        """
        found = {}
        for name, shape in self._shapes().items():
            numel = prod(shape)
            if name.endswith(START):
                parameter = name.removesuffix(START)
                start = self._starts.of_one(parameter, numel).to(
                    self._parameters[parameter].device, copy=True
                )
                found[name] = start.reshape(shape)
                continue
            residual = self._residuals.of_one(name, numel).to(self._parameters[name].device)
            lost = residual.reshape(shape) / self._scale
            dist.all_reduce(lost, group=self._group)
            found[name] = lost
        return found

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load residuals on any number of ranks; every rank takes an equal share."""
        expected_shapes = self._shapes()
        shapes = {name: tuple(lost.shape) for name, lost in state.items()}
        if shapes != expected_shapes:
            name = next(
                n for n in (*shapes, *expected_shapes) if shapes.get(n) != expected_shapes.get(n)
            )
            raise Mismatch(
                f"the saved residual of {name} has shape {shapes.get(name, 'none')}",
                expected=f"{expected_shapes.get(name, 'none')}, as this model and codec require",
                remedy="load the state saved with the same model and codec",
            )
        share = 1 / self._group.size()
        self._scale = 1.0
        flat = {name: tensor.reshape(-1) for name, tensor in state.items()}
        self._residuals.load((n, lost * share) for n, lost in flat.items() if not n.endswith(START))
        self._starts.load(
            (n.removesuffix(START), start.clone()) for n, start in flat.items() if n.endswith(START)
        )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the residuals and of the initial right factors, by name."""
        if not self._codec.has_residual:
            return {}
        compressed = {
            name: tuple(p.shape)
            for name, p in self._parameters.items()
            if p.requires_grad and self._is_compressed(p)
        }
        if not self._codec.rank:
            return compressed
        starts = {f"{n}{START}": (self._codec.rank, prod(s[1:])) for n, s in compressed.items()}
        return compressed | starts

    def _reduce(self, gradients: Mapping[str, torch.Tensor], scale: float) -> None:
        share = 1 / self._group.size()
        compressed = {name: g for name, g in gradients.items() if self._is_compressed(g)}
        if compressed and self._codec.rank:
            lost, start = self._residuals_and_starts(compressed, scale)
            with self._without_unused(compressed):
                self._sums.put_products([*compressed.values()], lost, start, share=share)
        elif compressed:
            _scale_into(compressed.values(), self._compressed_sum(compressed, scale), share)
        rest = [g for name, g in gradients.items() if name not in compressed]
        for dtype in dict.fromkeys(g.dtype for g in rest):
            same_dtype = [g for g in rest if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in same_dtype])
            dist.all_reduce(flat, group=self._group)
            _scale_into(same_dtype, flat, share)

    def _compressed_sum(self, compressed: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
        """Return the compressed sums over the ranks, flat."""
        flats = [g.reshape(-1) for g in compressed.values()]
        if not self._codec.has_residual:
            return self._sums.of(flats, None)
        lost = self._residuals_of(compressed, scale)
        with self._without_unused(compressed):
            return self._sums.of(flats, lost)

    @contextmanager
    def _without_unused(self, compressed: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Reset the residuals of parameters that no rank used: DDP would discard the gradient that
        contains them.
        """
        if not self._may_be_unused:
            yield
            return
        used = torch.stack([g.any() for g in compressed.values()]).to(torch.int32)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        residuals = [self._residuals.of_one(name, g.numel()) for name, g in compressed.items()]
        excluded = [
            torch.where(is_used == 0, residual, 0.0)
            for residual, is_used in zip(residuals, used, strict=True)
        ]
        for residual, part in zip(residuals, excluded, strict=True):
            residual.sub_(part)
        try:
            yield
        finally:
            for residual, part in zip(residuals, excluded, strict=True):
                residual.add_(part)

    def _residuals_and_starts(
        self, compressed: Mapping[str, torch.Tensor], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residuals of these matrices and their initial right factors."""
        columns = {name: g.numel() // len(g) for name, g in compressed.items()}
        sizes = {name: self._codec.rank * n for name, n in columns.items()}
        device = next(iter(compressed.values())).device
        return self._residuals_of(compressed, scale), self._starts.of(sizes, device)

    def _residuals_of(self, compressed: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
        if scale != self._scale:
            for lost in self._residuals.every():
                lost.mul_(scale / self._scale)
            self._scale = scale
        device = next(iter(compressed.values())).device
        return self._residuals.of({name: g.numel() for name, g in compressed.items()}, device)

    def _is_compressed(self, tensor: torch.Tensor) -> bool:
        if tensor.dtype != torch.float32 or tensor.dim() < 2 or not tensor.numel():
            return False
        if self._codec.rank:
            return are_worth_factors(len(tensor), tensor.numel() // len(tensor), self._codec.rank)
        return tensor.numel() * 4 >= _LEAST_BYTES


def _scale_into(gradients: Collection[torch.Tensor], total: torch.Tensor, share: float) -> None:
    for gradient, part in zip(gradients, _split_like(total, gradients), strict=True):
        torch.mul(part.view(gradient.shape), share, out=gradient)


def _split_like(flat: torch.Tensor, like: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """Split a flat tensor into pieces of these sizes; padding after the last piece is dropped."""
    sizes = [x.numel() for x in like]
    return list(flat[: sum(sizes)].split(sizes))
