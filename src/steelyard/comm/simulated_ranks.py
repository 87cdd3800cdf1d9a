"""Ranks as threads of one process, one of which runs at a time: what they exchange, without a link.

For a look at what ranks would train, where nothing but the numbers counts. Each has random numbers
of its own, as processes would. Not for running a plan.
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
    """So many ranks; ``run`` carries out what each does, and gives what each returned."""

    def __init__(self, num_ranks: int, device: torch.device = CPU) -> None:
        self._num_ranks, self._device = num_ranks, device
        # What is drawn on a host may be drawn on its GPU, too.
        self._generators = [generator_of(where) for where in dict.fromkeys((CPU, device))]
        self._turn = threading.Condition()
        self._at_work = 0
        self._ended: set[int] = set()
        self._numbers: dict[int, list[torch.Tensor]] = {}
        self._given: list[torch.Tensor | None] = [None] * num_ranks

    def channel(self, rank: int) -> Channel:
        calls = {
            "_c10d_functional.all_reduce.default": self._of(rank, _summed),
            "_c10d_functional.all_reduce_.default": self._of(rank, _summed_in_place),
            "_c10d_functional.reduce_scatter_tensor.default": self._of(rank, _scattered),
            "_c10d_functional.all_to_all_single.default": self._of(rank, _handed_out),
            "steelyard.all_gather": self._of(rank, _gathered),
        }
        return Channel(
            group="", backend="threads", num_ranks=self._num_ranks, rank=rank, waiting=_Arrived(),
            calls=calls, device=self._device,
        )  # fmt: skip

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        self._numbers = dict.fromkeys(range(self._num_ranks), self._drawn())
        ranks = range(self._num_ranks)
        with ThreadPoolExecutor(self._num_ranks) as pool:
            futures = [pool.submit(self._one, work, rank) for rank in ranks]
        failed = [error for f in futures if (error := f.exception()) is not None]
        for error in sorted(failed, key=lambda error: isinstance(error, _LeftAlone)):
            raise error
        self._draw_from(self._numbers[0])
        return [future.result() for future in futures]

    def _one(self, work: Callable[[int], Any], rank: int) -> Any:
        self._take_turn(rank)
        is_gpu = self._device.type == "cuda"
        try:
            # Each thread has a current GPU of its own.
            with torch.cuda.device(self._device) if is_gpu else contextlib.nullcontext():
                return work(rank)
        finally:
            self._ended.add(rank)
            self._hand_over(rank)

    def _take_turn(self, rank: int) -> None:
        with self._turn:
            came = self._turn.wait_for(lambda: self._at_work == rank, timeout=_WAIT_SECONDS)
        assert came, f"rank {rank} waits for one that never comes"
        self._draw_from(self._numbers[rank])

    def _hand_over(self, rank: int) -> None:
        self._numbers[rank] = self._drawn()
        others = ((rank + step) % self._num_ranks for step in range(1, self._num_ranks + 1))
        with self._turn:
            self._at_work = next((other for other in others if other not in self._ended), rank)
            self._turn.notify_all()

    def _drawn(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _draw_from(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _of(self, rank: int, made: "_Made") -> Callable[..., torch.Tensor]:
        """Everyone gives, in turn; then each takes, in turn."""

        def call(x: torch.Tensor, *_: object) -> torch.Tensor:
            self._given[rank] = x.clone()
            self._hand_over(rank)
            self._take_turn(rank)
            given = [value for value in self._given if value is not None]
            if len(given) < self._num_ranks or self._ended:
                raise _LeftAlone("another rank has ended, and exchanges nothing more")
            result = made(x, given, rank)
            self._hand_over(rank)
            self._take_turn(rank)
            return result

        return call


class _LeftAlone(RuntimeError):
    """Another rank's failure is the cause."""


_Made = Callable[[torch.Tensor, Sequence[torch.Tensor], int], torch.Tensor]


class _Arrived(Waiting):
    """Nothing is ever on its way."""

    def __call__(self, sent: torch.Tensor) -> torch.Tensor:
        return sent


def _summed(x: torch.Tensor, given: Sequence[torch.Tensor], rank: int) -> torch.Tensor:  # noqa: ARG001
    total = given[0].clone()
    for value in given[1:]:
        total += value
    return total


def _summed_in_place(x: torch.Tensor, given: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    return x.copy_(_summed(x, given, rank))


def _scattered(x: torch.Tensor, given: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    return _summed(x, given, rank).chunk(len(given))[rank].clone()


def _gathered(x: torch.Tensor, given: Sequence[torch.Tensor], rank: int) -> torch.Tensor:  # noqa: ARG001
    return torch.cat(list(given))


def _handed_out(x: torch.Tensor, given: Sequence[torch.Tensor], rank: int) -> torch.Tensor:  # noqa: ARG001
    return torch.cat([value.chunk(len(given))[rank] for value in given])
