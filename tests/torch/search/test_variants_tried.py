"""A search tries all variants of the whole batch before it stops."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.ir.program import Program
from steelyard.plans.budget import Budget
from steelyard.predict import peak_bytes
from steelyard.search import StepSearch
from steelyard.trades import TRADES
from tests.support.stepping import COSTS, source_of


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def test_chunks_are_tried_even_if_little_memory_is_missing() -> None:
    """A chunk may be faster than the step without trades, so no other plan is good enough."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6))
    model = nn.Sequential(nn.Embedding(64, 16), *blocks, nn.Linear(16, 2048))
    source = source_of((model, _loss, torch.randint(64, (8, 32))))
    plain = Program.plain(source.graph(micro_batches=1))
    search = StepSearch(plain, trades=TRADES, source=source, costs=COSTS)
    search.find(Budget(memory_bytes=peak_bytes(plain, COSTS) - 1))
    assert any(variant.chunks for variant in search._plans.known)
