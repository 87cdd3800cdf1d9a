"""The buckets of DistributedDataParallel, sent in a code: which gradients go in it, what they lose,
and when that is sent.

Not for how they are added up: see compressed_reduce.py.
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

# Of a smaller gradient the code saves next to nothing.
_LEAST_BYTES = 4096


class Buckets:
    """One after another, ``beside`` the backward pass, which goes on meanwhile."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        codec: Codec,
        sums: CompressedReduce,
        group: dist.ProcessGroup,
        scaler: Any,
        beside: BackgroundWork,
        *,
        may_be_unused: bool,
    ) -> None:
        self._parameters = dict(parameters)
        self._names = {id(p): name for name, p in parameters.items()}
        self._codec, self._sums, self._group, self._scaler = codec, sums, group, scaler
        self._beside, self._may_be_unused = beside, may_be_unused
        self._lost = BucketState(room=sums.room, first=partial(torch.zeros, dtype=torch.float32))
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
        """The mean over the ranks, in place of the buffer's gradients."""
        names = [self._names[id(p)] for p in parameters]
        if is_first and self._scaler:  # of a backward pass; a GPU is waited for
            self._scale_now = self._scaler.get_scale()
        scale = self._scale_now

        def work() -> None:
            with torch.no_grad():
                self._summed(dict(zip(names, gradients, strict=True)), scale)

        return self._beside.do(work, buffer)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Of each parameter by name, the sum over all ranks, who call this together; and what right
        factors begin with, which is all ranks'."""
        found = {}
        for name, shape in self._shapes().items():
            numel = prod(shape)
            if name.endswith(START):
                of = name.removesuffix(START)
                start = self._starts.of_one(of, numel).to(self._parameters[of].device, copy=True)
                found[name] = start.reshape(shape)
                continue
            kept = self._lost.of_one(name, numel).to(self._parameters[name].device)
            lost = kept.reshape(shape) / self._scale
            dist.all_reduce(lost, group=self._group)
            found[name] = lost
        return found

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """On any number of ranks, of which each takes an equal share."""
        known = self._shapes()
        given = {name: tuple(lost.shape) for name, lost in state.items()}
        if given != known:
            name = next(n for n in (*given, *known) if given.get(n) != known.get(n))
            raise Mismatch(
                f"what was lost of {name} has shape {given.get(name, 'none')}",
                expected=f"{known.get(name, 'none')}, as this model and code have it",
                remedy="load what the same model and code saved",
            )
        share = 1 / self._group.size()
        self._scale = 1.0
        flat = {name: kept.reshape(-1) for name, kept in state.items()}
        self._lost.load((n, lost * share) for n, lost in flat.items() if not n.endswith(START))
        self._starts.load(
            (n.removesuffix(START), start.clone()) for n, start in flat.items() if n.endswith(START)
        )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what can be lost, by parameter, and of what its right factors begin with."""
        if not self._codec.has_residual:
            return {}
        coded = {
            name: tuple(p.shape)
            for name, p in self._parameters.items()
            if p.requires_grad and self._goes_in_code(p)
        }
        if not self._codec.rank:
            return coded
        starts = {f"{n}{START}": (self._codec.rank, prod(s[1:])) for n, s in coded.items()}
        return coded | starts

    def _summed(self, gradients: Mapping[str, torch.Tensor], scale: float) -> None:
        share = 1 / self._group.size()
        coded = {name: g for name, g in gradients.items() if self._goes_in_code(g)}
        if coded and self._codec.rank:
            lost, start = self._kept(coded, scale)
            with self._unused_left_out(coded):
                self._sums.put_products([*coded.values()], lost, start, share=share)
        elif coded:
            _put_into(coded.values(), self._in_code(coded, scale), share)
        rest = [g for name, g in gradients.items() if name not in coded]
        for dtype in dict.fromkeys(g.dtype for g in rest):
            alike = [g for g in rest if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in alike])
            dist.all_reduce(flat, group=self._group)
            _put_into(alike, flat, share)

    def _in_code(self, coded: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
        """The sums, flat."""
        flats = [g.reshape(-1) for g in coded.values()]
        if not self._codec.has_residual:
            return self._sums.of(flats, None)
        lost = self._lost_of(coded, scale)
        with self._unused_left_out(coded):
            return self._sums.of(flats, lost)

    @contextmanager
    def _unused_left_out(self, coded: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Of a parameter that no rank came by nothing is sent: DDP would throw it away."""
        if not self._may_be_unused:
            yield
            return
        used = torch.stack([g.any() for g in coded.values()]).to(torch.int32)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        places = [self._lost.of_one(name, g.numel()) for name, g in coded.items()]
        aside = [
            torch.where(is_used == 0, place, 0.0)
            for place, is_used in zip(places, used, strict=True)
        ]
        for place, waits in zip(places, aside, strict=True):
            place.sub_(waits)
        try:
            yield
        finally:
            for place, waits in zip(places, aside, strict=True):
                place.add_(waits)

    def _kept(
        self, coded: Mapping[str, torch.Tensor], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is kept of matrices: what was lost of them, and what right factors start with."""
        columns = {name: g.numel() // len(g) for name, g in coded.items()}
        sizes = {name: self._codec.rank * n for name, n in columns.items()}
        device = next(iter(coded.values())).device
        return self._lost_of(coded, scale), self._starts.of(sizes, device)

    def _lost_of(self, coded: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
        if scale != self._scale:
            for lost in self._lost.every():
                lost.mul_(scale / self._scale)
            self._scale = scale
        device = next(iter(coded.values())).device
        return self._lost.of({name: g.numel() for name, g in coded.items()}, device)

    def _goes_in_code(self, tensor: torch.Tensor) -> bool:
        if tensor.dtype != torch.float32 or tensor.dim() < 2 or not tensor.numel():
            return False
        if self._codec.rank:
            return are_worth_factors(len(tensor), tensor.numel() // len(tensor), self._codec.rank)
        return tensor.numel() * 4 >= _LEAST_BYTES


def _put_into(gradients: Collection[torch.Tensor], total: torch.Tensor, share: float) -> None:
    for gradient, own in zip(gradients, _apart(total, gradients), strict=True):
        torch.mul(own.view(gradient.shape), share, out=gradient)


def _apart(flat: torch.Tensor, like: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """One behind the other; what is behind the last is no one's."""
    sizes = [x.numel() for x in like]
    return list(flat[: sum(sizes)].split(sizes))
