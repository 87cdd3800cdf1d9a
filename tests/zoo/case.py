"""What a zoo case is: a named way to build a model, a loss and a batch from a seed.

Not the models (own, hf, edge) and not what eager PyTorch makes of them (reference).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

Scale: TypeAlias = Literal["tiny", "small"]
Loss: TypeAlias = Callable[[Any, Any], Any]
Sample: TypeAlias = tuple[nn.Module, Loss, Any]
Build: TypeAlias = Callable[[Scale], Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One entry of the zoo. `note` says what is awkward about it, or why it must be refused."""

    name: str
    build: Build
    note: str = ""
    scales: tuple[Scale, ...] = ("tiny", "small")

    def make(self, seed: int = 0, scale: Scale = "tiny") -> Sample:
        """Build `(model, loss, batch)`. The caller's random stream is left where it was."""
        if scale not in self.scales:
            raise ValueError(f"{self.name} has no scale {scale!r}; it has {', '.join(self.scales)}")
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            model, loss, batch = self.build(scale)
        return model.train(), loss, batch

    def batches(self, count: int, *, seed: int = 0, scale: Scale = "tiny") -> tuple[Any, ...]:
        """`count` batches; the first is the one `make(seed, scale)` gives."""
        return tuple(self.make(seed + index, scale)[2] for index in range(count))

    def __str__(self) -> str:
        return self.name


class Shelf:
    """Collects the cases of one file, in the order they are written."""

    def __init__(self, *, scales: tuple[Scale, ...] = ("tiny", "small")) -> None:
        self._scales = scales
        self._cases: dict[str, Case] = {}

    def add(self, note: str = "", *, name: str = "") -> Callable[[Build], Build]:
        """Decorate a builder; the case takes the builder's name unless one is given."""

        def put(build: Build) -> Build:
            case = Case(name=name or build.__name__, build=build, note=note, scales=self._scales)
            assert case.name not in self._cases, case.name
            self._cases[case.name] = case
            return build

        return put

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(self._cases.values())


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of logits (B, T, V) against labels (B, T)."""
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy of logits (B, C) against labels (B,)."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def square_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean square of the model's output, for models whose target is irrelevant."""
    output: Tensor = model(batch["x"]).square().mean()
    return output


def tokens(count: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    """Return random ids, and the same ids shifted by one place as labels."""
    ids = torch.randint(0, vocabulary, (count, length))
    return {"x": ids, "y": ids.roll(-1, 1)}


def images(count: int, size: int, classes: int) -> dict[str, Tensor]:
    """Return random pictures with three channels, and a class for each."""
    return {"x": torch.randn(count, 3, size, size), "y": torch.randint(0, classes, (count,))}
