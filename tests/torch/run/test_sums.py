"""A sum over ranks is stored in the rank's own gradient tensor, whose old storage is then freed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steelyard.measure.operators.memory import meter_once
from steelyard.run.binding import _Gradient, _Sum


@pytest.mark.parametrize("turned", [False, True])
def test_gradient_storage_is_freed_after_the_all_reduce(turned: bool) -> None:
    """This also holds if the backward pass returns a view as the gradient."""
    parameter = nn.Parameter(torch.zeros(64, 64))
    nbytes = 64 * 64 * 4

    def step() -> torch.Tensor:
        with torch.no_grad():
            own = torch.ones(64, 64)
            _Gradient(parameter)(own.t() if turned else own)
            del own
            held = parameter.grad
            summed = torch.full((64 * 64,), 2.0)
            _Sum(parameter)(summed.view(64, 64))
        assert held is parameter.grad
        return summed

    metered = meter_once(step)
    assert torch.equal(parameter.grad, torch.full((64, 64), 2.0))
    assert metered.peak_bytes == 2 * nbytes
    assert metered.left_bytes == nbytes
