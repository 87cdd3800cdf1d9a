"""The buckets of DistributedDataParallel, sent in a code: which gradients go in it, and what they
lose, by the names of parameters, since buckets change.

Not for how they are added up: see sums.py.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from steelyard.core.codec import Codec
from steelyard.core.errors import Mismatch, RunFailed
from steelyard.hooks.sums import Sums

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
        # What is lost of each parameter is a part of what is lost of its bucket.
        self._lost: dict[str, torch.Tensor] = {}
        self._of_bucket: dict[tuple[str, ...], torch.Tensor] = {}
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
        """Of each parameter by name, the sum over all ranks, who call this together."""
        found = {}
        for name in self._coded():
            lost = self._lost.get(name)
            whole = torch.zeros(self._parameters[name].shape)
            if lost is not None:
                whole.view(-1).copy_(lost).div_(self._scale)
            dist.all_reduce(whole, group=self._group)
            found[name] = whole
        return found

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """On any number of ranks, of which each takes an equal share."""
        known = {name: tuple(self._parameters[name].shape) for name in self._coded()}
        given = {name: tuple(lost.shape) for name, lost in state.items()}
        if given != known:
            name = next(n for n in (*given, *known) if given.get(n) != known.get(n))
            raise Mismatch(
                f"what was lost of {name} has shape {given.get(name, 'none')}",
                expected=f"{known.get(name, 'none')}, as this model and code have it",
                remedy="load what the same model and code saved",
            )
        share = 1 / self._group.size()
        self._of_bucket.clear()
        self._scale = 1.0
        self._lost = {name: lost.reshape(-1) * share for name, lost in state.items()}

    def _coded(self) -> list[str]:
        """The parameters of which something can be lost."""
        if not self._codec.has_residual:
            return []
        return [n for n, p in self._parameters.items() if p.requires_grad and _goes_in_code(p)]

    def _summed(self, gradients: Mapping[str, torch.Tensor], scale: float) -> None:
        share = 1 / self._group.size()
        coded = {name: g for name, g in gradients.items() if _goes_in_code(g)}
        if coded:
            flats = [g.reshape(-1) for g in coded.values()]
            total = self._sums.of(flats, self._lost_of(coded, scale))
            _put_into(coded.values(), total, share)
        rest = [g for name, g in gradients.items() if name not in coded]
        for dtype in dict.fromkeys(g.dtype for g in rest):
            alike = [g for g in rest if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in alike])
            dist.all_reduce(flat, group=self._group)
            _put_into(alike, flat, share)

    def _lost_of(self, coded: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor | None:
        if not self._codec.has_residual:
            return None
        if scale != self._scale:
            for lost in (*self._of_bucket.values(), *self._not_in_buckets()):
                lost.mul_(scale / self._scale)
            self._scale = scale
        key = tuple(coded)
        if key not in self._of_bucket:
            self._of_bucket[key] = self._put_together(coded)
        return self._of_bucket[key]

    def _not_in_buckets(self) -> list[torch.Tensor]:
        """What was loaded, and has not been sent since."""
        within = {name for key in self._of_bucket for name in key}
        return [lost for name, lost in self._lost.items() if name not in within]

    def _put_together(self, coded: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """For a bucket that has not been there before, what is known to be lost of each of its
        parameters; buckets that had some of them are no more."""
        whole = torch.zeros(self._sums.room(sum(g.numel() for g in coded.values())))
        for name, place in zip(coded, _apart(whole, coded.values()), strict=True):
            if name in self._lost:
                place.copy_(self._lost[name])
            self._lost[name] = place
        gone = [key for key in self._of_bucket if not coded.keys().isdisjoint(key)]
        for key in gone:
            del self._of_bucket[key]
        return whole


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


def _goes_in_code(tensor: torch.Tensor) -> bool:
    is_large = tensor.dim() > 1 and tensor.numel() * 4 >= _LEAST_BYTES
    return is_large and tensor.dtype == torch.float32
