"""The buckets of DistributedDataParallel, sent in a code: which gradients go in it, what they lose,
and when that is sent.

Not for how they are added up: see sums.py.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from steelyard.core.codec import START, Codec, are_worth_factors
from steelyard.core.errors import Mismatch, RunFailed
from steelyard.hooks.kept import Kept
from steelyard.hooks.sums import Sums
from steelyard.operators.low_rank import first_start

# Of a smaller gradient the code saves next to nothing.
_LEAST_BYTES = 4096


class Buckets:
    """One after another, on a thread of its own: meanwhile the backward pass goes on."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        codec: Codec,
        sums: Sums,
        group: dist.ProcessGroup,
        scaler: Any,
    ) -> None:
        self._parameters = dict(parameters)
        self._names = {id(p): name for name, p in parameters.items()}
        self._codec, self._sums, self._group, self._scaler = codec, sums, group, scaler
        self._full: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Not one that the process would wait for at its end: a rank that is gone sends nothing.
        Thread(target=_at_work, args=(self._full,), name="steelyard-hooks", daemon=True).start()
        self._lost = Kept(room=sums.room, first=torch.zeros)
        self._starts = Kept(room=lambda numel: numel, first=first_start)
        self._scale = 1.0

    def send(
        self,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
    ) -> torch.futures.Future[torch.Tensor]:
        """The mean over the ranks, in place of the buffer's gradients."""
        names = [self._names[id(p)] for p in parameters]
        scale = self._scaler.get_scale() if self._scaler else 1.0
        done: torch.futures.Future[Any] = torch.futures.Future()

        def work() -> None:
            try:
                with torch.no_grad():
                    self._summed(dict(zip(names, gradients, strict=True)), scale)
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 - raised where the backward pass waits for it
                done.set_result(error)

        def given(done: torch.futures.Future[Any]) -> torch.Tensor:
            if (error := done.value()) is not None:
                raise RunFailed(
                    f"gradients did not come from all ranks: {str(error)[:200]}",
                    expected="every rank there until the backward pass is over",
                    remedy="look at the rank that ended first; go on from a checkpoint",
                )
            return buffer

        # Not set_exception: torch would say that it is no tensor.
        sent = done.then(given)
        self._full.put(work)
        return sent

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Of each parameter by name, the sum over all ranks, who call this together; and what right
        factors begin with, which is all ranks'."""
        found = {}
        for name, shape in self._shapes().items():
            numel = prod(shape)
            if name.endswith(START):
                start = self._starts.of_one(name.removesuffix(START), numel)
                found[name] = start.reshape(shape).clone()
                continue
            lost = self._lost.of_one(name, numel).reshape(shape) / self._scale
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
        if coded:
            _put_into(coded.values(), self._in_code(coded, scale), share)
        rest = [g for name, g in gradients.items() if name not in coded]
        for dtype in dict.fromkeys(g.dtype for g in rest):
            alike = [g for g in rest if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in alike])
            dist.all_reduce(flat, group=self._group)
            _put_into(alike, flat, share)

    def _in_code(self, coded: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
        """The sums, flat."""
        codec, flats = self._codec, [g.reshape(-1) for g in coded.values()]
        if not codec.has_residual:
            return self._sums.of(flats, None)
        if scale != self._scale:
            for lost in self._lost.every():
                lost.mul_(scale / self._scale)
            self._scale = scale
        lost = self._lost.of({name: g.numel() for name, g in coded.items()})
        if not codec.rank:
            return self._sums.of(flats, lost)
        columns = {name: g.numel() // len(g) for name, g in coded.items()}
        start = self._starts.of({name: codec.rank * n for name, n in columns.items()})
        return self._sums.of_factors([*coded.values()], lost, start)

    def _goes_in_code(self, tensor: torch.Tensor) -> bool:
        if tensor.dtype != torch.float32 or tensor.dim() < 2 or not tensor.numel():
            return False
        if self._codec.rank:
            return are_worth_factors(len(tensor), tensor.numel() // len(tensor), self._codec.rank)
        return tensor.numel() * 4 >= _LEAST_BYTES


def _at_work(full: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        full.get()()


def _put_into(gradients: Collection[torch.Tensor], total: torch.Tensor, share: float) -> None:
    for gradient, own in zip(gradients, _apart(total, gradients), strict=True):
        torch.mul(own.view(gradient.shape), share, out=gradient)


def _apart(flat: torch.Tensor, like: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """One behind the other; what is behind the last is no one's."""
    sizes = [x.numel() for x in like]
    return list(flat[: sum(sizes)].split(sizes))
