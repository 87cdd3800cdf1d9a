"""The location of an offloaded weight or gradient, and the layout of an offloaded tensor.

Not for transfers: see parameters.py and the files for slices.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedLayout:
    """The shape, strides and dtype of an offloaded tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor) -> "OffloadedLayout":
        return cls(shape=x.shape, stride=x.stride(), dtype=x.dtype)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")

    def on(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(slots=True, kw_only=True, eq=False)
class TensorLocation:
    """The place of one weight or gradient in offload memory. ``offloaded`` is the live tensor on
    ``pages``, the memory-mapped bytes of that place."""

    parameter: nn.Parameter
    offset: int
    pages: torch.Tensor
    offloaded: torch.Tensor

    def is_offloaded(self, x: torch.Tensor | None) -> bool:
        return x is not None and x.data_ptr() == self.offloaded.data_ptr()

    def set_layout(self, like: torch.Tensor) -> torch.Tensor:
        self.offloaded = OffloadedLayout.of(like).on(self.pages)
        return self.offloaded

    def set_row_major(self) -> None:
        """Make the offloaded tensor row-major, whatever its layout was."""
        self.offloaded = self.pages.view(self.offloaded.dtype).view(self.offloaded.shape)
