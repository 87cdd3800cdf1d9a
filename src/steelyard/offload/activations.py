"""Offloaded activations of a forward and backward pass, by slot. Each is sent once per step and
fetched back.

The program determines which values are transferred, and when. Not for weights and gradients, which
stay offloaded between steps: see parameters.py.
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
    """The transfer calls of a program, each with a slot number: send, wait until sent, begin to
    fetch, wait until fetched; or begin and end to fetch in slices. ``products`` read those slices.
    """

    _memory: OffloadFile
    _offsets: list[int]
    _layouts: dict[int, "_Layout"] = field(default_factory=dict)
    _fetching: dict[int, "Future[None]"] = field(default_factory=dict)
    products: SlicedMatmuls = field(init=False)

    def __post_init__(self) -> None:
        self.products = SlicedMatmuls(self._memory)

    @classmethod
    def of(cls, memory: OffloadFile, sizes: Sequence[int]) -> Self:
        """Reserve offload memory for the values of one program."""
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
        """Return True if the last fetch from this slot is complete."""
        return self._fetching[slot].done()

    def fetched(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        self._memory.await_fetched(self._fetching.pop(slot))
        return x

    def begin(self, slot: int, _: None, parts: int, rows: int, columns: int) -> torch.Tensor:
        """Begin to fetch the rows of a value in ``parts`` slices; return the buffer, which has room
        for two.
        """
        shape, stride, dtype = self._layouts[slot]
        if not torch.empty_strided(shape, stride, device="meta").is_contiguous():
            raise RunFailed(
                f"a value to be fetched in slices has shape {list(shape)}, strides {list(stride)}",
                expected="contiguous rows, as torch described the value when it was captured",
                remedy="set slices of its offload rule to 0, and report this model",
            )
        matrix = OffloadedMatrix(
            offset=self._offsets[slot], rows=rows, columns=columns, dtype=dtype
        )
        return self.products.begin(slot, matrix, parts)

    def end(self, slot: int, _: torch.Tensor, __: object) -> None:
        self.products.end(slot)


_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _layout(x: torch.Tensor) -> _Layout:
    """Return the layout of a value as its kernel made it; the traced layout may be another one."""
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride()))
    if x.numel() and span != x.numel():
        raise RunFailed(
            f"a value to be offloaded has gaps: shape {list(x.shape)}, strides {list(x.stride())}",
            expected="a value without gaps in memory, as torch described it when it was captured",
            remedy="remove its offload rule from the plan, and report this model",
        )
    return x.shape, x.stride(), x.dtype
