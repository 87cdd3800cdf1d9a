"""Where in offload memory a weight or a gradient lies, and how a tensor lies that is not here.

Not for moving it: see parameters.py and the files for slices.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedLayout:
    """How a tensor lies that is not here."""

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
    """Where in offload memory one of them lies; ``there`` is the live tensor that is that place."""

    parameter: nn.Parameter
    offset: int
    pages: torch.Tensor
    there: torch.Tensor

    def is_home(self, x: torch.Tensor | None) -> bool:
        return x is not None and x.data_ptr() == self.there.data_ptr()

    def lay_out(self, like: torch.Tensor) -> torch.Tensor:
        self.there = OffloadedLayout.of(like).on(self.pages)
        return self.there

    def lay_out_rows(self) -> None:
        """Row by row, whatever it was."""
        self.there = self.pages.view(self.there.dtype).view(self.there.shape)
