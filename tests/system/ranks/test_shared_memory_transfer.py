"""Ranks exchange through shared memory if that is faster; otherwise the plan says why not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import steelyard as sy
from steelyard.measure.cache import CostCache
from steelyard.measure.links.probe import context_of
from steelyard.plan_files.plan_file import read_decisions
from steelyard.plans.trade import Remaining
from steelyard.trades.shared_memory_transfer import SharedMemoryTransferRule
from tests.system.ranks.test_gradient_compression import LINK
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

_RULE = SharedMemoryTransferRule(messages="exchanges")
_FAST = {"slotted call": 1e-5, "slotted hop": 1e-5, "slotted rate": 8e9}
_SLOW = {"slotted call": 1e-3, "slotted hop": 1e-1, "slotted rate": 1e7}

pytestmark = pytest.mark.xdist_group("slotted")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the measured costs of one model for all tests; each test writes its
    own link."""
    return tmp_path_factory.mktemp("slotted")


def _planned(
    costs_in: Path, monkeypatch: pytest.MonkeyPatch, slots: dict[str, float]
) -> sy.Planned:
    """Plan for ranks that gloo joins at 100 MB/s."""
    monkeypatch.setenv("STEELYARD_CACHE", str(costs_in / "costs.sqlite"))
    CostCache().write_rates(context_of(2), {**LINK, "rate": 1e8, **slots})
    torch.manual_seed(0)
    model = GPT(layers=2, width=64, heads=2, vocabulary=256, length=32, dropout=0.0)
    optimizer, cluster = partial(torch.optim.SGD, lr=0.1), sy.Cluster.here(ranks=2)
    return sy.plan(
        model, next_token_loss, tokens(64, 32, 256), optimizer=optimizer, cluster=cluster
    )


def test_shared_memory_transfer_is_taken_where_it_is_faster(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _planned(folder, monkeypatch, _FAST)
    assert _RULE in plan.plan.decisions.rules
    (taken,) = (t for t in plan.plan.taken if t.trade == "shared_memory_transfer")
    assert taken.rules == (_RULE,)
    assert taken.label == "collectives through shared memory"
    assert taken.buys_seconds > 1e-3
    assert taken.buys_bytes < 0, "the slots are there all the time"
    left = [refusal.left for refusal in plan.plan.refused]
    assert plan.plan.num_offers == len(plan.plan.taken) + left.count(Remaining.WHOLE)
    peak = plan.plan.predicted.peak
    assert any(h.what == "receive slots for messages of other ranks" for h in peak.alive)
    plan.save(path := tmp_path / "train.plan.toml")
    assert '[[shared_memory_transfer]]\nmessages = "exchanges"' in path.read_text()
    assert read_decisions(path).rules == plan.plan.decisions.rules


def test_shared_memory_transfer_is_refused_with_its_cost_where_it_is_slower(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _planned(folder, monkeypatch, _SLOW)
    assert _RULE not in plan.plan.decisions.rules
    (refusal,) = (r for r in plan.plan.refused if r.trade == "shared_memory_transfer")
    assert refusal.left is Remaining.WHOLE
    assert "would take ~" in refusal.reason
    assert "without it, a step takes ~" in refusal.reason
    left = [r.left for r in plan.plan.refused]
    assert plan.plan.num_offers == len(plan.plan.taken) + left.count(Remaining.WHOLE)


def test_ranks_without_shared_memory_get_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _planned(folder, monkeypatch, {})
    (refusal,) = (r for r in plan.plan.refused if r.trade == "shared_memory_transfer")
    assert refusal.left is Remaining.NEVER
    assert refusal.reason.startswith("these ranks are not known to share memory")
