"""Hooks that users register on parameters: found before each step, and refused where they differ.

A hook runs once for each whole gradient. Not for running hooks: see accumulate.py.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from steelyard import _torch
from steelyard.errors import Mismatch


class ParameterHooks:
    """The hooks of a model's parameters that require gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._accumulators: list[Any] | None = None

    def are_registered(self) -> bool:
        if self._accumulators is None:
            self._accumulators = _torch.accumulators(self._parameters)
        return _torch.any_hooks(self._parameters, self._accumulators)

    def refuse_in_micro_batches(self, repeats: int) -> None:
        """Raise Mismatch if a hook would run for each of several micro-batches."""
        if repeats > 1 and self.are_registered():
            raise self.mismatch(repeats)

    def mismatch(self, repeats: int) -> Mismatch:
        named = self._model.named_parameters()
        name = next(name for name, p in named if p.requires_grad and _torch.any_hooks([p]))
        return Mismatch(
            f"parameter {name} has a hook, which would run for each of {repeats} micro-batches",
            expected="no hooks of parameters in a step with micro-batches",
            remedy="remove the hook, or plan again with it, so that the batch is not split",
        )

    def refuse_on_sliced(self, names: Sequence[str]) -> None:
        """Raise Mismatch if a parameter whose gradient is computed in slices has a hook."""
        if not names or not self.are_registered():
            return
        for name in names:
            if _torch.any_hooks([self._model.get_parameter(name)]):
                raise Mismatch(
                    f"parameter {name} has a hook, but its gradient is never whole under this plan",
                    expected="no hooks of parameters whose gradients are computed in slices",
                    remedy="remove the hook, or plan again with it, to have that gradient whole",
                )
