"""Yields batches over epochs, from a position to which a resumed run can return.

Not for training on a batch: see train_loop.py.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from steelyard.errors import BadInput
from steelyard.run.rng_state import Generators, RandomState, random_state, set_random_state

Batches = Iterable[Any] | Callable[[], Iterator[Any]]

_END = object()


class Feed:
    """Draws batches from an iterable (a DataLoader), or from a callable that returns an iterator.

    At the end it starts the next epoch. The position is ``epoch``, ``taken`` and ``began``: a
    resumed run sets the random states to ``began``, restarts the epoch and skips ``taken`` batches.
    Only the generators of torch, Python, numpy and the loader are handled. An iterator that uses
    another generator must seed that itself, in the same way in every epoch.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self.generators = _generators(batches)
        self.epoch = 0
        self.taken = 0
        self.began = random_state(self.generators)

    def next(self) -> Any:
        if self._iterator is None:
            self._start()
        assert self._iterator is not None
        batch = next(self._iterator, _END)
        if batch is not _END:
            self.taken += 1
            return batch
        if not self.taken or self._iterator is self._batches:
            raise BadInput(
                f"the batches ended after {self.taken} of them",
                expected="batches that can be iterated several times",
                remedy="pass a list, a DataLoader, or a function that returns a new iterator",
            )
        self.epoch += 1
        self.taken = 0
        self._iterator = None
        return self.next()

    def go_to(self, *, epoch: int, taken: int, began: RandomState) -> None:
        """Skip the batches that were already taken. The random states are left arbitrary."""
        self.epoch, skipped = epoch, 0
        if taken:
            set_random_state(began, self.generators)
            self._start()
            # The number in the checkpoint is not trusted, so the loop ends with the epoch.
            while skipped < taken:
                self.next()
                if self.epoch != epoch:
                    break
                skipped += 1
            self.epoch = epoch
        if skipped != taken:
            raise BadInput(
                f"an epoch has {skipped} batches, but the checkpoint is after {taken}",
                expected="the data of the run that saved the checkpoint",
                remedy="resume with the same data",
            )

    def _start(self) -> None:
        self.began = random_state(self.generators)
        self.taken = 0
        batches = self._batches
        self._iterator = iter(batches) if isinstance(batches, Iterable) else iter(batches())


def _generators(batches: Batches) -> Generators:
    owners = {"loader": batches, "sampler": getattr(batches, "sampler", None)}
    found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
    return {name: g for name, g in found.items() if isinstance(g, torch.Generator)}
