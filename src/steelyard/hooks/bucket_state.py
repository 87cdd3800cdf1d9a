"""State that is kept from step to step for each parameter, stored as one tensor per bucket.

When DDP rebuilds its buckets, the state moves along by parameter name. Not for the meaning of the
state: see ddp.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch


class BucketState:
    """State of parameters by bucket. ``room`` returns the number of state elements for a given
    number of parameter elements in a bucket; the last ones may be padding. ``first`` makes the
    initial state of a parameter.
    """

    def __init__(self, *, room: Callable[[int], int], first: Callable[[int], torch.Tensor]) -> None:
        self._room, self._first = room, first
        self._by_parameter: dict[str, torch.Tensor] = {}
        self._by_bucket: dict[tuple[str, ...], torch.Tensor] = {}

    def of(self, sizes: Mapping[str, int], device: torch.device) -> torch.Tensor:
        """Return the state of the bucket of these parameters, concatenated, on the bucket's
        device."""
        key = tuple(sizes)
        if key not in self._by_bucket:
            self._by_bucket[key] = self._build_bucket(sizes, device)
        return self._by_bucket[key]

    def of_one(self, name: str, size: int) -> torch.Tensor:
        return self._by_parameter[name] if name in self._by_parameter else self._first(size)

    def every(self) -> Iterator[torch.Tensor]:
        """Yield each state once, including loaded state that is in no bucket yet."""
        yield from self._by_bucket.values()
        in_buckets = {name for key in self._by_bucket for name in key}
        yield from (state for name, state in self._by_parameter.items() if name not in in_buckets)

    def load(self, state: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._by_bucket.clear()
        self._by_parameter = dict(state)

    def _build_bucket(self, sizes: Mapping[str, int], device: torch.device) -> torch.Tensor:
        """Build the state of a new bucket, and drop the buckets that had some of its parameters."""
        numel = sum(sizes.values())
        whole = torch.zeros(self._room(numel), dtype=torch.float32, device=device)
        parts = whole[:numel].split([*sizes.values()])
        for (name, size), part in zip(sizes.items(), parts, strict=True):
            part.copy_(self.of_one(name, size))
            self._by_parameter[name] = part
        obsolete = [key for key in self._by_bucket if not sizes.keys().isdisjoint(key)]
        for key in obsolete:
            del self._by_bucket[key]
        return whole
