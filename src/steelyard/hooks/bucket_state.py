"""What is kept from step to step of each parameter, as parts of what is kept of its bucket.

Buckets change, and then it goes on by the names of parameters. Not for what it is: see ddp.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch


class BucketState:
    """``room`` says how many elements are kept of a bucket whose parameters have so many, the last
    of them perhaps nobody's; ``first`` makes what a parameter begins with."""

    def __init__(self, *, room: Callable[[int], int], first: Callable[[int], torch.Tensor]) -> None:
        self._room, self._first = room, first
        self._of: dict[str, torch.Tensor] = {}
        self._of_bucket: dict[tuple[str, ...], torch.Tensor] = {}

    def of(self, sizes: Mapping[str, int], device: torch.device) -> torch.Tensor:
        """Of the bucket of these parameters, one behind the other, where the bucket is."""
        key = tuple(sizes)
        if key not in self._of_bucket:
            self._of_bucket[key] = self._put_together(sizes, device)
        return self._of_bucket[key]

    def of_one(self, name: str, size: int) -> torch.Tensor:
        return self._of[name] if name in self._of else self._first(size)

    def every(self) -> Iterator[torch.Tensor]:
        """All there is, once; what was loaded, and has not been sent since, is in no bucket."""
        yield from self._of_bucket.values()
        within = {name for key in self._of_bucket for name in key}
        yield from (kept for name, kept in self._of.items() if name not in within)

    def load(self, state: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._of_bucket.clear()
        self._of = dict(state)

    def _put_together(self, sizes: Mapping[str, int], device: torch.device) -> torch.Tensor:
        """Buckets that had some of these parameters are no more."""
        numel = sum(sizes.values())
        whole = torch.zeros(self._room(numel), dtype=torch.float32, device=device)
        places = whole[:numel].split([*sizes.values()])
        for (name, size), place in zip(sizes.items(), places, strict=True):
            place.copy_(self.of_one(name, size))
            self._of[name] = place
        gone = [key for key in self._of_bucket if not sizes.keys().isdisjoint(key)]
        for key in gone:
            del self._of_bucket[key]
        return whole
