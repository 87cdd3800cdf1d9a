"""What cannot be captured is refused with its true reason, and a remedy that is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from steelyard.core.errors import CaptureRefused
from tests.capture.stepping import source_of

GENERATOR = torch.Generator()


@pytest.mark.parametrize("is_made_inside", [True, False])
def test_a_generator_of_its_own_is_named(is_made_inside: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        x = model(batch)
        generator = torch.Generator() if is_made_inside else GENERATOR
        return (x + torch.rand(x.shape, generator=generator)).mean()

    with pytest.raises(CaptureRefused, match="drawn from a generator of its own") as refused:
        source_of((nn.Linear(2, 2), loss, torch.randn(3, 2))).graph(micro_batches=1)
    assert "next: leave generator= out, or draw before the step" in str(refused.value)
