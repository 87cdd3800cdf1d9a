"""The generated source: the calls that it contains, and those that it omits."""

from __future__ import annotations

import re
from itertools import pairwise

import torch
from torch import Tensor, nn

from steelyard.capture.step import CapturedStep
from steelyard.comm.simulated_ranks import SimulatedRanks
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.plans.trade import apply_rules
from steelyard.run.codegen import emit, with_strides
from steelyard.trades import TRADES
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.shard_batch import ShardBatchRule
from tests.support.live import captured, live
from tests.zoo import case


class Views(nn.Module):
    """A model with views that equal their argument, and one that only seems to."""

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
    assert "expand_" not in source  # the value already has the shape
    assert "view_" in source


def test_computation_yields_only_while_a_transfer_is_pending() -> None:
    model, loss, batch = case("gpt").make(0)
    source = CapturedStep(model=model, loss=loss, batch=batch)
    channels = {"data": SimulatedRanks(2).channel(0)}

    def lines(*rules: Rule) -> list[str]:
        whole = (ShardBatchRule(ranks=2, bucket=1 << 14), *rules)
        program = apply_rules(
            Program.plain(source.graph(micro_batches=1)), whole, trades=TRADES, source=source
        )
        return emit(program, channels=channels).source.splitlines()

    assert not any("give_way" in line for line in lines())  # each exchange is waited for at once
    underway: set[str] = set()
    late = lines(OverlapRule(window=2))
    turns = 0
    for before, line in pairwise(late):
        if "give_way" in line:
            turns += 1
            assert underway, before
            assert not re.search(r"= (view|t|permute)_\d", before)
        sent = re.match(r"    (v\d+) = all_reduce__?\d+\(", line)
        waited = re.match(r"    v\d+ = wait_tensor_\d+\((v\d+)\)", line)
        underway |= {sent[1]} if sent else set()
        underway -= {waited[1]} if waited else set()
    assert turns > 10


def test_compiled_segments_receive_the_declared_strides() -> None:
    """The value may begin anywhere on its storage; a dim of one may have any stride."""
    whole = torch.arange(24.0).view(4, 6)
    inside = whole[1:3]
    assert with_strides(inside, (6, 1)) is inside
    single = whole[:1]
    assert with_strides(single, (99, 1)) is single
    turned = with_strides(whole.t(), (4, 1))
    assert turned.stride() == (4, 1)
    assert torch.equal(turned, whole.t())
