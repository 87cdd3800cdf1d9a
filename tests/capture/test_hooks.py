"""What a captured step could not honour is refused by the name of the module that has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from steelyard.capture.hooks import refuse_hooks
from steelyard.core.errors import CaptureRefused


@pytest.mark.parametrize(
    ("wrapped", "said"), [("", "the model has"), ("0", "module 0 has"), ("1.0", r"module 1\.0 has")]
)
def test_what_has_been_through_compile_is_refused_wherever_it_sits(wrapped: str, said: str) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    refuse_hooks(model)
    compiled = torch.compile(model.get_submodule(wrapped))
    if wrapped:
        model.set_submodule(wrapped, compiled)
    with pytest.raises(CaptureRefused, match=f"{said} been through torch.compile") as refused:
        refuse_hooks(model if wrapped else compiled)
    assert len(str(refused.value).splitlines()) == 3
