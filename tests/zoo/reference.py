"""What eager PyTorch makes of a case, and bitwise comparison with it.

No Steelyard in here: this is the other side of every comparison.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .case import Loss

Named = Mapping[str, Tensor | None]


def eager_step(
    model: nn.Module, loss: Loss, batch: Any, seed: int
) -> tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]:
    """One forward and backward: the loss, every parameter's gradient or None, every buffer after.

    The gradients are cleared first; model and buffers are left as the step leaves them, and the
    answer holds copies. Parameters and buffers go by their first name.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    value = loss(model, batch)
    value.backward()
    return value.detach().clone(), gradients(model), buffers(model)


def train(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    steps: int,
    seed: int,
) -> tuple[list[Tensor], nn.Module]:
    """Train a copy of `model`, going round `batches`; the losses and the trained copy.

    The random stream is seeded once, at the start, so a step that draws more or less than eager
    shows in every later step.
    """
    trained = copy.deepcopy(model)
    stepper = optimizer(parameter for parameter in trained.parameters() if parameter.requires_grad)
    torch.manual_seed(seed)
    values = []
    for index in range(steps):
        stepper.zero_grad(set_to_none=True)
        value = loss(trained, batches[index % len(batches)])
        value.backward()
        stepper.step()
        values.append(value.detach().clone())
    return values, trained


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's gradient, copied, or None."""
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Every buffer, copied."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, copied."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def difference(expected: Named, actual: Named) -> str | None:
    """None where both are equal to the bit, else one readable message about the first that is not.

    Order is that of `expected`. NaN equals NaN, and 0.0 equals -0.0 (which no kernel promises).
    """
    if missing := [name for name in expected if name not in actual]:
        return f"{missing[0]} is missing ({len(missing)} of {len(expected)} are)"
    if extra := [name for name in actual if name not in expected]:
        return f"{extra[0]} was not expected ({len(extra)} were not)"
    found = [
        (name, said)
        for name, tensor in expected.items()
        if (said := _tensor_difference(tensor, actual[name]))
    ]
    if not found:
        return None
    name, said = found[0]
    return f"{name}: {said} ({len(found)} of {len(expected)} differ)"


def assert_same(expected: Named, actual: Named, what: str = "tensors") -> None:
    """Fail with the message of `difference`."""
    if said := difference(expected, actual):
        raise AssertionError(f"{what} differ: {said}")


def assert_same_model(expected: nn.Module, actual: nn.Module) -> None:
    """Parameters and buffers of two models are equal to the bit."""
    assert_same(parameters(expected), parameters(actual), "parameters")
    assert_same(buffers(expected), buffers(actual), "buffers")


def assert_same_losses(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> None:
    """Two runs gave the same losses, step by step."""
    assert_same(
        {f"step {index}": value for index, value in enumerate(expected)},
        {f"step {index}": value for index, value in enumerate(actual)},
        "losses",
    )


def _tensor_difference(expected: Tensor | None, actual: Tensor | None) -> str | None:
    if expected is None or actual is None:
        if expected is actual:
            return None
        there, gone = ("actual", "expected") if expected is None else ("expected", "actual")
        return f"{gone} is None, {there} is a tensor"
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return (
            f"expected {expected.dtype} {tuple(expected.shape)}, "
            f"got {actual.dtype} {tuple(actual.shape)}"
        )
    if expected.layout != actual.layout:
        return f"expected layout {expected.layout}, got {actual.layout}"
    if expected.is_sparse:
        expected, actual = expected.to_dense(), actual.to_dense()
    if torch.equal(expected, actual):
        return None
    wide = torch.complex128 if expected.is_complex() else torch.float64
    left, right = expected.detach().to(wide), actual.detach().to(wide)
    same = (left == right) | (left.isnan() & right.isnan())
    if bool(same.all()):
        return None
    gap = (left - right).abs()[~same]
    largest = float(left.abs().nan_to_num().max())
    return (
        f"{int((~same).sum())} of {same.numel()} elements differ, max difference "
        f"{float(gap.max()):.3e} where the largest expected is {largest:.3e}"
    )
