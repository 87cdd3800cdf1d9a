"""The gradient of a table is sent as rows if the whole table would take too long; otherwise the
plan says why."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import steelyard as sy
from steelyard.measure.cache import CostCache
from steelyard.measure.links.probe import context_of
from steelyard.plan_files.plan_file import read_decisions
from steelyard.plans.trade import Remaining
from tests.system.ranks.test_gradient_compression import LINK

_OPTIMIZER = partial(torch.optim.SGD, lr=0.1)


class Bag(nn.Module):
    """A model that reads few of many words, with enough computation that a second rank is
    worthwhile."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, 64), nn.Embedding(32, 64)
        self.inner = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64))

    def forward(self, x: Tensor) -> Tensor:
        looked_up = self.words(x) + self.places(torch.arange(32))
        result: Tensor = torch.tanh(self.inner(looked_up)).mean(1)
        return result


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def _planned(folder: Path, monkeypatch: pytest.MonkeyPatch, words: int) -> sy.Planned:
    monkeypatch.setenv("STEELYARD_CACHE", str(folder / "costs.sqlite"))
    # Messages are as slow as elsewhere and there is no shared memory, so that pipeline stages,
    # which do not send the table, are slower.
    link = {**LINK, "rate": 4e7, "hand rate": 4e7, "slot rate": 1e-12}
    CostCache().write_rates(context_of(2), link)
    torch.manual_seed(0)
    batch = {"x": torch.randint(words, (256, 32)), "y": torch.randint(64, (256,))}
    return sy.plan(Bag(words), _loss, batch, optimizer=_OPTIMIZER, cluster=sy.Cluster.here(ranks=2))


def test_few_rows_of_a_large_embedding_are_sent_as_sparse_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _planned(tmp_path, monkeypatch, 25_000)
    (taken,) = (t for t in plan.plan.taken if t.trade == "sparse_gradients")
    # An all-reduce of 6.4 MB takes 160 ms on this link, and its used rows 28 ms. The gain is much
    # more than what a second rank saves by computing a part: 60 ms of 120 on a fast machine.
    assert taken.buys_seconds > 0.1
    assert taken.rules[0].parameter == "words.weight"
    assert plan.predicted.accuracy_loss == "exact"
    assert plan.predicted.communication_bytes.value < 4e6
    assert "rows of 1 tensor from 2 ranks" in str(plan)
    left = [refusal.left for refusal in plan.plan.refused]
    assert plan.plan.num_offers == len(plan.plan.taken) + left.count(Remaining.WHOLE)
    (other,) = (r for r in plan.plan.refused if r.trade == "sparse_gradients")
    assert other.label == "rows of places.weight"
    assert other.reason == "2 ranks look up 32 rows each, and the table has only 32"
    plan.save(path := tmp_path / "train.plan.toml")
    assert (
        '[[sparse_gradients]]\nparameter = "words.weight"\ncount = 1\nformat = "rows"'
        in path.read_text()
    )
    assert read_decisions(path).rules == plan.plan.decisions.rules
