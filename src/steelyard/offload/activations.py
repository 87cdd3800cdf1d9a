"""Values of a pass in offload memory, by slot: each is sent once in a step, and comes back for it.

Not for which, nor when: that is the program's. Not for what stays there: see parameters.py.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

import torch

from steelyard.errors import RunFailed
from steelyard.offload.sliced_matmul import OffloadedMatrix, SlicedMatmuls
from steelyard.offload.tier import OffloadFile


@dataclass(slots=True)
class Slots:
    """What a program calls, by slot: send, let go, begin to fetch, hand over; or begin to fetch in
    slices, end. ``products`` read those."""

    _memory: OffloadFile
    _offsets: list[int]
    _layouts: dict[int, "_Layout"] = field(default_factory=dict)
    _fetching: dict[int, "Future[None]"] = field(default_factory=dict)
    products: SlicedMatmuls = field(init=False)

    def __post_init__(self) -> None:
        self.products = SlicedMatmuls(self._memory)

    @classmethod
    def of(cls, memory: OffloadFile, sizes: Sequence[int]) -> Self:
        """Room for one program's values."""
        return cls(memory, memory.shared(sizes))

    def send(self, slot: int, x: torch.Tensor) -> "Future[None]":
        self._layouts[slot] = _layout(x)
        self.products.forget(slot)
        return self._memory.send(self._offsets[slot], x)

    def sent(self, slot: int, sending: "Future[None]", x: torch.Tensor) -> None:  # noqa: ARG002
        self._memory.await_sent(sending)

    def fetch(self, slot: int, _: None) -> torch.Tensor:
        shape, stride, dtype = self._layouts[slot]
        x = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        self._fetching[slot] = self._memory.fetch(self._offsets[slot], x)
        return x

    def has_arrived(self, slot: int) -> bool:
        """Whether what was last fetched from there is here."""
        return self._fetching[slot].done()

    def fetched(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        self._memory.await_fetched(self._fetching.pop(slot))
        return x

    def begin(self, slot: int, _: None, parts: int, rows: int, columns: int) -> torch.Tensor:
        """Begin to fetch its rows in so many slices; the room for two of them."""
        shape, stride, dtype = self._layouts[slot]
        if not torch.empty_strided(shape, stride, device="meta").is_contiguous():
            raise RunFailed(
                f"a value to come back in slices has shape {list(shape)}, strides {list(stride)}",
                expected="rows that lie one behind the other, as torch described it when captured",
                remedy="set slices of its offload rule to 0, and report this model",
            )
        there = OffloadedMatrix(offset=self._offsets[slot], rows=rows, columns=columns, dtype=dtype)
        return self.products.begin(slot, there, parts)

    def end(self, slot: int, _: torch.Tensor, __: object) -> None:
        self.products.end(slot)


_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _layout(x: torch.Tensor) -> _Layout:
    """How the value lies, as its kernel made it, which may be otherwise than torch describes."""
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride()))
    if x.numel() and span != x.numel():
        raise RunFailed(
            f"a value to be moved has gaps: shape {list(x.shape)}, strides {list(x.stride())}",
            expected="a value that fills its memory, as torch described it when it was captured",
            remedy="take its offload rule out of the plan, and report this model",
        )
    return x.shape, x.stride(), x.dtype
