"""Batch after batch, epoch after epoch, from a place that a resumed run can find again.

Not for what is done with a batch: see train_loop.py.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from steelyard.errors import BadInput
from steelyard.run.rng_state import Generators, RandomState, random_state, set_random_state

Batches = Iterable[Any] | Callable[[], Iterator[Any]]

_END = object()


class Feed:
    """Draws from ``batches``: an iterable (a DataLoader), or a callable that gives an iterator.

    At its end it starts again. ``epoch``, ``taken`` and ``began`` tell where it stands: a resumed
    run sets the random states to ``began``, starts the epoch anew and passes over ``taken``
    batches. Only torch's, Python's and numpy's own generators and a loader's are known here; an
    iterator that draws from another has to seed it itself, alike in every epoch.
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
                expected="batches that can be gone through again",
                remedy="give a list, a DataLoader, or a function that returns a new iterator",
            )
        self.epoch += 1
        self.taken = 0
        self._iterator = None
        return self.next()

    def go_to(self, *, epoch: int, taken: int, began: RandomState) -> None:
        """Pass over what was already taken; leaves the random states anywhere."""
        self.epoch, passed = epoch, 0
        if taken:
            set_random_state(began, self.generators)
            self._start()
            # Not by the number in the checkpoint alone, which may be any: an epoch ends.
            while passed < taken:
                self.next()
                if self.epoch != epoch:
                    break
                passed += 1
            self.epoch = epoch
        if passed != taken:
            raise BadInput(
                f"an epoch has {passed} batches, and the checkpoint is after {taken}",
                expected="the data of the run that saved the checkpoint",
                remedy="resume with the same data",
            )

    def _start(self) -> None:
        self.began = random_state(self.generators)
        self.taken = 0
        given = self._batches
        self._iterator = iter(given) if isinstance(given, Iterable) else iter(given())


def _generators(batches: Batches) -> Generators:
    owners = {"loader": batches, "sampler": getattr(batches, "sampler", None)}
    found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
    return {name: g for name, g in found.items() if isinstance(g, torch.Generator)}
