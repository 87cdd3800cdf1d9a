"""The generated source: what it calls, and what it need not call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steelyard.run.emit import emit
from tests.run.live import captured, live
from tests.zoo import case


class Views(nn.Module):
    """Views that are their argument over again, and one that only looks so."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        same = x.view(x.shape).expand(x.shape).permute(0, 1)
        turned = torch.view_as_complex(same.view(4, 3, 2)).conj() * weight
        return turned.imag.sum()


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.views = Views()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.views(x, self.weight)
        return result


def test_a_conjugate_is_no_identity() -> None:
    torch.manual_seed(0)
    model, batch = Turned(), torch.randn(4, 6)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = m(x)
        return value

    step = live(model, loss, batch)
    value = step(batch)
    ours = model.weight.grad
    model.weight.grad = None
    expected = loss(model, batch)
    expected.backward()
    assert torch.equal(value, expected)
    assert ours is not None
    assert torch.equal(ours, model.weight.grad)


def test_views_that_change_nothing_are_not_called() -> None:
    model, loss, batch = case("gpt").make(0)
    program, *_ = captured(model, loss, batch)
    assert any(node.op == "aten.expand.default" for node in program.graph.nodes)
    assert any(node.op == "aten.view.default" for node in program.graph.nodes)
    source = emit(program).source
    assert "expand_" not in source  # each is to the shape that is there already
    assert "view_" in source
