"""Simulated ranks: threads of one process, one of which runs at a time. They exchange data without
a network.

They serve to study the numerics of multi-rank training, as in accuracy probes; timings mean
nothing. Each rank has its own state of the random generators, as a process would. Not for running a
plan.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from steelyard.comm.channel import Channel, Waiting
from steelyard.comm.devices import CPU, generator_of

_WAIT_SECONDS = 600.0


class SimulatedRanks:
    """Simulated ranks. ``run`` runs a function on each and returns the results by rank."""

    def __init__(self, num_ranks: int, device: torch.device = CPU) -> None:
        self._num_ranks, self._device = num_ranks, device
        # A rank may draw random numbers on the CPU and on its GPU.
        self._generators = [generator_of(where) for where in dict.fromkeys((CPU, device))]
        self._turn = threading.Condition()
        self._running_rank = 0
        self._ended: set[int] = set()
        self._rng_states: dict[int, list[torch.Tensor]] = {}
        self._contributions: list[torch.Tensor | None] = [None] * num_ranks

    def channel(self, rank: int) -> Channel:
        calls = {
            "_c10d_functional.all_reduce.default": self._collective(rank, _all_reduce),
            "_c10d_functional.all_reduce_.default": self._collective(rank, _all_reduce_in_place),
            "_c10d_functional.reduce_scatter_tensor.default": self._collective(
                rank, _reduce_scatter
            ),
            "_c10d_functional.all_to_all_single.default": self._collective(rank, _all_to_all),
            "steelyard.all_gather": self._collective(rank, _all_gather),
        }
        return Channel(
            group="", backend="threads", num_ranks=self._num_ranks, rank=rank, waiting=_Arrived(),
            calls=calls, device=self._device,
        )  # fmt: skip

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        self._rng_states = dict.fromkeys(range(self._num_ranks), self._rng_state())
        ranks = range(self._num_ranks)
        with ThreadPoolExecutor(self._num_ranks) as pool:
            futures = [pool.submit(self._run_rank, work, rank) for rank in ranks]
        failed = [error for f in futures if (error := f.exception()) is not None]
        for error in sorted(failed, key=lambda error: isinstance(error, _LeftAlone)):
            raise error
        self._set_rng_state(self._rng_states[0])
        return [future.result() for future in futures]

    def _run_rank(self, work: Callable[[int], Any], rank: int) -> Any:
        self._take_turn(rank)
        is_gpu = self._device.type == "cuda"
        try:
            # The current GPU is a setting of each thread.
            with torch.cuda.device(self._device) if is_gpu else contextlib.nullcontext():
                return work(rank)
        finally:
            self._ended.add(rank)
            self._yield_turn(rank)

    def _take_turn(self, rank: int) -> None:
        with self._turn:
            has_turn = self._turn.wait_for(
                lambda: self._running_rank == rank, timeout=_WAIT_SECONDS
            )
        assert has_turn, f"rank {rank} timed out waiting for its turn"
        self._set_rng_state(self._rng_states[rank])

    def _yield_turn(self, rank: int) -> None:
        self._rng_states[rank] = self._rng_state()
        others = ((rank + step) % self._num_ranks for step in range(1, self._num_ranks + 1))
        with self._turn:
            self._running_rank = next((other for other in others if other not in self._ended), rank)
            self._turn.notify_all()

    def _rng_state(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set_rng_state(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _collective(self, rank: int, reduce: "_Made") -> Callable[..., torch.Tensor]:
        """Return the collective ``reduce`` for one rank. All ranks contribute one after the other,
        then all take the result.
        """

        def call(x: torch.Tensor, *_: object) -> torch.Tensor:
            self._contributions[rank] = x.clone()
            self._yield_turn(rank)
            self._take_turn(rank)
            contributions = [value for value in self._contributions if value is not None]
            if len(contributions) < self._num_ranks or self._ended:
                raise _LeftAlone("another rank has ended and exchanges no more data")
            result = reduce(x, contributions, rank)
            self._yield_turn(rank)
            self._take_turn(rank)
            return result

        return call


class _LeftAlone(RuntimeError):
    """The error of a rank whose peer ended; the failure of that peer is the cause."""


_Made = Callable[[torch.Tensor, Sequence[torch.Tensor], int], torch.Tensor]


class _Arrived(Waiting):
    """A work object that waits for nothing, because every result is complete when it is
    returned.
    """

    def __call__(self, sent: torch.Tensor) -> torch.Tensor:
        return sent


def _all_reduce(x: torch.Tensor, contributions: Sequence[torch.Tensor], rank: int) -> torch.Tensor:  # noqa: ARG001
    total = contributions[0].clone()
    for value in contributions[1:]:
        total += value
    return total


def _all_reduce_in_place(
    x: torch.Tensor, contributions: Sequence[torch.Tensor], rank: int
) -> torch.Tensor:
    return x.copy_(_all_reduce(x, contributions, rank))


def _reduce_scatter(
    x: torch.Tensor, contributions: Sequence[torch.Tensor], rank: int
) -> torch.Tensor:
    return _all_reduce(x, contributions, rank).chunk(len(contributions))[rank].clone()


def _all_gather(x: torch.Tensor, contributions: Sequence[torch.Tensor], rank: int) -> torch.Tensor:  # noqa: ARG001
    return torch.cat(list(contributions))


def _all_to_all(x: torch.Tensor, contributions: Sequence[torch.Tensor], rank: int) -> torch.Tensor:  # noqa: ARG001
    return torch.cat([value.chunk(len(contributions))[rank] for value in contributions])
