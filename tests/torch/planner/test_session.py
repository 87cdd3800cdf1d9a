"""The search over layouts is repeated if a graph that it used differs from the captured one."""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from steelyard.capture.step import CapturedStep
from steelyard.hardware.cluster import Cluster
from steelyard.planner.session import PlanningSession
from steelyard.plans.budget import Budget
from tests.zoo.case import square_loss


class _ByNumber(nn.Module):
    """Takes another path for few samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.relu().relu() if len(x) < 4 else y.relu()


class _Session:
    """A session whose search always chooses two ranks with half of the batch each."""

    find_layout: Any = PlanningSession.find_layout
    cluster = Cluster.here()

    def __init__(self, source: CapturedStep) -> None:
        self.source = source
        self.searches = 0

    @cached_property
    def layouts(self) -> Any:
        self.searches += 1
        assert self.searches < 4, "the search does not end"
        self.source.graph(micro_batches=2)
        program = SimpleNamespace(units=2, share=1, sibling_programs=())
        found = SimpleNamespace(program=program)
        return SimpleNamespace(find=lambda *_, **__: found)


def _searches(model: nn.Module) -> int:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    session = _Session(CapturedStep(model=model, loss=square_loss, batch=batch))
    session.find_layout(Budget())
    return session.searches


def test_a_search_with_a_graph_unlike_the_capture_is_repeated_once() -> None:
    assert _searches(_ByNumber()) == 2


def test_a_search_with_graphs_like_the_captures_is_not_repeated() -> None:
    assert _searches(nn.Linear(4, 4)) == 1
