"""One capture for every number of samples: its figures for another number equal those of a
capture there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from steelyard.capture.deep.batch_template import TruncatedStep
from steelyard.capture.step import CapturedStep
from steelyard.ir.batch_template import telling_number
from steelyard.ir.graph import Graph, Role
from tests.support.torch_since import torch_since
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

_ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def _gpt(layers: int) -> GPT:
    return GPT(layers=layers, width=32, heads=2, vocabulary=64, length=16)


def _step(layers: int = 7, samples: int = 8) -> TruncatedStep:
    batch = tokens(samples, 16, 64)
    return TruncatedStep(model=_gpt(layers), loss=next_token_loss, batch=batch, optimizer=_ADAMW)


def _figures(graph: Graph) -> list[Any]:
    return [
        (n.op, n.flops, n.moved_bytes, [(t.shape, t.stride, t.dtype) for t in n.outputs])
        for n in graph.nodes
    ]


@pytest.fixture(scope="module")
def step() -> TruncatedStep:
    return _step()


@pytest.mark.parametrize("samples", [2, 3, 8])
def test_a_template_has_the_operators_of_a_capture_with_as_many_samples(
    step: TruncatedStep, samples: int
) -> None:
    short = CapturedStep(model=_gpt(3), loss=next_token_loss, batch=tokens(samples, 16, 64))
    captured, said = short.captured().graph, step.whole.at(samples)
    assert _figures(said) == _figures(captured)
    assert [s.nbytes for s in said.storages] == [s.nbytes for s in captured.storages]


# No size in the step is a multiple of these numbers, so a capture can tell the batch from the
# sequence, which is split. With fewer samples, the gradient of the words would be sent in another
# way.
@torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12")
@pytest.mark.parametrize("samples", [11, 13])
def test_sharded_templates_exchange_the_bytes_of_a_capture_with_as_many_samples(
    step: TruncatedStep, samples: int
) -> None:
    said = step.in_parts(2).at(samples)
    other = TruncatedStep(
        model=_gpt(7), loss=next_token_loss, batch=tokens(samples, 16, 64), optimizer=None
    )
    other.__dict__["_samples"] = samples  # captured with exactly this number of samples
    captured = other.in_parts(2).graph
    sent = [[n.collective.sent_bytes for n in g.nodes if n.collective] for g in (said, captured)]
    assert sent[0] == sent[1]
    assert len(sent[0]) > 6
    assert [n.flops for n in said.nodes] == [n.flops for n in captured.nodes]


def test_the_blocks_are_found_and_the_bytes_of_their_optimizer(step: TruncatedStep) -> None:
    assert (step.blocks.path, step.blocks.first, step.blocks.count) == ("blocks", 0, 7)
    formats = step.formats
    assert (formats.weight_bytes, formats.gradient_bytes, formats.state_bytes) == (4, 4, 8)
    assert step.num_samples == 8
    assert step.why_indivisible == ""


@torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12")
def test_no_tensor_is_cut_twice_and_each_is_a_parameter(step: TruncatedStep) -> None:
    names = [name for region in step.regions(2) for name, _ in region.inputs]
    assert len(names) == len(set(names)) > 6
    graph = step.whole.graph
    roles = {graph.storages[graph.by_name[n].outputs[0].storage].role for n in names}
    assert roles == {Role.PARAMETER}


def test_coupled_samples_are_reported() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x)
            return y - y.mean(0)

    step = TruncatedStep(
        model=Centred(), loss=lambda m, b: m(b).square().mean(), batch=torch.randn(8, 4),
        optimizer=None,
    )  # fmt: skip
    assert "samples are not independent" in step.why_indivisible
    assert step.blocks.count == 0


def test_a_batch_without_a_common_dim_is_not_resized() -> None:
    batch = {"x": torch.randn(6, 4), "weight": torch.randn(4)}
    step = TruncatedStep(
        model=nn.Linear(4, 4), loss=lambda m, b: (m(b["x"]) * b["weight"]).mean(), batch=batch,
        optimizer=None,
    )  # fmt: skip
    assert "share dim 0" in step.why_indivisible
    assert step.num_samples == 1
    assert step.whole.at(1) is step.whole.graph


def test_the_number_is_a_prime_that_no_size_near_is_a_multiple_of() -> None:
    assert telling_number({64, 512}) == 101
    assert telling_number({64, 203}) == 103  # 202 is twice 101
    assert telling_number({101 * 103}) == 107
