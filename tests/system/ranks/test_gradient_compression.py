"""Gradients are compressed if the link is slow and accuracy may be lost; otherwise the plan says
why not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steelyard as sy
from steelyard import _torch
from steelyard.ir.gradient_codec import CODED_CALLS
from steelyard.ir.metrics import Estimate
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import Rule, of_kind
from steelyard.measure.cache import CostCache
from steelyard.measure.links.probe import context_of
from steelyard.measure.operators import benchmark as operators
from steelyard.planner import compiled as lowering
from steelyard.planner import gradient_compression as coded
from steelyard.planner.gradient_compression import peak_in_less_lossy_codecs
from steelyard.planner.session import Runner
from steelyard.plans.codec_fallbacks import codec_fallbacks
from steelyard.plans.trade import Remaining
from steelyard.predict import peak_bytes
from steelyard.predict.cost_table import OperatorCost
from steelyard.search.ranks.gradient_compression import CompressedCandidate, Weighing
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.units import format_seconds

# These are link costs as `measured_ranks` would return them.
LINK = {
    "latency": 1e-4, "call": 6e-5, "disturbs": 0.05, "hop": 1e-4, "hand": 5e-5,
    "hand disturbs": 0.05, "hand rate": 1e9,
    "slot hop": 1e-4, "slot rate": 4e9, "slot hand": 5e-5, "speed of rank 0": 1.0,
    "speed of rank 1": 1.0, "slotted call": 1e-12, "slotted hop": 1e-12, "slotted rate": 1e-12,
}  # fmt: skip
_SLOW, _FAST = 12.5e6, 1e12
_TRADES = (
    "ternary_gradients", "quantized_gradients", "low_rank_gradients", "top_k_gradients",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the measured costs of one model for all tests; each test writes its
    own link."""
    return tmp_path_factory.mktemp("coded")


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def _at_fixed_rates(table: operators._Table, subjects: list[operators._Subject]) -> None:
    """Costs at 100 GFLOP/s and 8 GB/s. Times that other tests disturb choose other shares."""
    for subject in subjects:
        node = subject.node
        seconds = Estimate.within(node.flops / 1e11 + subject.nbytes / 8e9 + 1e-5, share=0.1)
        cost = OperatorCost(seconds=seconds, workspace_bytes=subject.workspace_bytes)
        table.costs[node.signature] = cost


def _planned(
    costs_in: Path,
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    accuracy_loss: str,
    optimizer: Any,
    runner: Runner = "python",
    second: float = 1.0,
) -> sy.Planned:
    monkeypatch.setenv("STEELYARD_CACHE", str(costs_in / "costs.sqlite"))
    monkeypatch.setattr(operators._Table, "_take_turns", _at_fixed_rates)
    CostCache().write_rates(context_of(2), {**LINK, "rate": rate, "speed of rank 1": second})
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    batch = {"x": torch.randn(4096, 256), "y": torch.randint(0, 10, (4096,))}
    return sy.plan(
        model, _loss, batch, optimizer=optimizer, cluster=sy.Cluster.here(ranks=2),
        budget=sy.Budget(accuracy_loss=accuracy_loss), runner=runner,
    )  # fmt: skip


_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@pytest.mark.xdist_group("coded")
def test_gradients_are_compressed_where_the_link_is_slow_and_the_probe_allows_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_gentler: list[CompressedCandidate] = []
    gentler = Weighing.gentler
    monkeypatch.setattr(
        Weighing, "gentler", lambda own, way: made_gentler.append(way) or gentler(own, way)
    )
    plan = _planned(folder, monkeypatch, _SLOW, "5%", _SGD)
    assert made_gentler
    taken = {taken.trade for taken in plan.plan.taken}
    assert taken & set(_TRADES)
    assert "shard_batch" in taken
    assert "probe: 10 steps" in plan.predicted.accuracy_loss
    # Every offer was taken or refused.
    left = [refusal.left for refusal in plan.plan.refused]
    assert plan.plan.num_offers == len(plan.plan.taken) + left.count(Remaining.WHOLE)
    plan.save(tmp_path / "train.plan.toml")
    rules = {rule.trade for rule in plan.plan.decisions.rules}
    assert rules & set(_TRADES)
    # Without an accuracy budget there is no compression, and the plan says what was not taken.
    exact = plan.what_if(accuracy_loss="0%")
    assert not {taken.trade for taken in exact.plan.taken} & set(_TRADES)
    assert exact.predicted.accuracy_loss == "exact"
    assert any("accuracy budget is 0" in exact.why_not(trade) for trade in _TRADES)
    assert exact.predicted.step_seconds.value > plan.predicted.step_seconds.value
    # No probe keeps this budget.
    strict = plan.what_if(accuracy_loss="0.0000000001%")
    assert strict.predicted.accuracy_loss == "exact"
    assert any("a probe drifted" in strict.why_not(trade) for trade in _TRADES)


@pytest.mark.xdist_group("coded")
def test_compression_is_not_considered_with_an_exact_budget(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weighed(*args: Any, **how: Any) -> Any:
        raise AssertionError("codes were weighed that may not be taken")

    monkeypatch.setattr(Weighing, "fastest", weighed)
    plan = _planned(folder, monkeypatch, _SLOW, "0%", _SGD)
    assert not {taken.trade for taken in plan.plan.taken} & set(_TRADES)
    lossy = [refusal for refusal in plan.plan.refused if refusal.trade in _TRADES]
    assert {refusal.trade for refusal in lossy} == set(_TRADES)
    assert all("is lossy and the accuracy budget is 0" in refusal.reason for refusal in lossy)
    waits = plan.predicted.exposed_communication_seconds.value
    if ParallelLayout.of(plan.plan.decisions.rules).data == 2:
        bound = f"at most the ~{format_seconds(waits)} that ranks wait"
        assert all(bound in refusal.reason for refusal in lossy)
    left = [refusal.left for refusal in plan.plan.refused]
    assert plan.plan.num_offers == len(plan.plan.taken) + left.count(Remaining.WHOLE)


@pytest.mark.xdist_group("coded")
def test_ranks_of_unequal_speed_compress_gradients_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _planned(folder, monkeypatch, _SLOW, "5%", _SGD, second=0.6)
    rules = plan.plan.decisions.rules
    assert {rule.trade for rule in rules} & set(_TRADES)
    (shares,) = (rule.shares for rule in of_kind(rules, ShardBatchRule))
    assert shares[0] > shares[1]
    # The probe splits the batch as the plan does.
    assert "probe: 10 steps" in plan.predicted.accuracy_loss
    assert {each.share for each in plan.session.apply_rules(rules).sibling_programs} == {
        min(shares)
    }


@pytest.mark.xdist_group("coded")
def test_the_memory_budget_holds_for_fallback_codecs_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the residual of a codec grows too large, training continues with less lossy codecs."""
    plan = _planned(folder, monkeypatch, _SLOW, "5%", _SGD)
    session, rules = plan.session, plan.plan.decisions.rules
    peaks = [
        peak_bytes(session.apply_rules(rung), session.prices.costs)
        for rung in codec_fallbacks(rules)
    ]
    assert len(peaks) > 2
    assert peak_in_less_lossy_codecs(session, rules, session.apply_rules(rules)) >= max(peaks[1:])

    def much_in_the_middle(_: Any, rung: Sequence[Rule]) -> int:
        codes = {rule.trade for rule in rung} & set(_TRADES)
        return 2**40 if codes == {"quantized_gradients"} else 0

    monkeypatch.setattr(coded, "_peak_bytes", much_in_the_middle)
    bound = plan.what_if(memory=2 * max(peaks), accuracy_loss="5%")
    *coded_rungs, _ = codec_fallbacks(bound.plan.decisions.rules)
    assert not any(much_in_the_middle(None, rung) for rung in coded_rungs[1:])
    said = "with it, steps in less lossy codecs or uncompressed would take 1.00 TiB"
    assert any(said in bound.why_not(trade) for trade in _TRADES), [
        bound.why_not(trade) for trade in _TRADES
    ]


@pytest.mark.xdist_group("coded")
def test_compiled_steps_compress_gradients_and_are_priced_as_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowering, "_NUM_ALTERNATIVES", 1)
    plan = _planned(folder, monkeypatch, _SLOW, "5%", _SGD, runner="inductor")
    assert {taken.trade for taken in plan.plan.taken} & set(_TRADES)
    assert "probe: 10 steps" in plan.predicted.accuracy_loss
    session, rules = plan.session, plan.plan.decisions.rules
    lowered = session.as_executed(session.apply_rules(rules))
    ops = {node.op for node in lowered.graph.nodes}
    assert ops & CODED_CALLS
    assert any(op.startswith("inductor.fused.") for op in ops)
    # The prediction is that of the compiled program, with and without compression.
    assert (
        plan.predicted.step_seconds
        == session.priced(session.apply_rules(rules)).metrics.step_seconds
    )
    exact = plan.what_if(accuracy_loss="0%")
    assert exact.predicted.step_seconds.value > 1.05 * plan.predicted.step_seconds.value
    assert any("accuracy budget is 0" in exact.why_not(trade) for trade in _TRADES)


@pytest.mark.xdist_group("coded")
def test_compression_is_refused_with_its_cost_where_the_link_is_fast(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_gentler: list[object] = []
    monkeypatch.setattr(Weighing, "gentler", lambda _, way: made_gentler.append(way) or way)
    plan = _planned(folder, monkeypatch, _FAST, "5%", _SGD)
    assert plan.predicted.accuracy_loss == "exact"
    # Codes that cannot pay are not probed any further.
    assert not made_gentler
    for trade in _TRADES:
        why = plan.why_not(trade)
        assert "would cost" in why or "would save" in why
        assert "computation" in why or "within the prediction error" in why


def test_without_a_compiler_only_codecs_that_need_none_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "cpp_compiler", lambda: None)
    # Here half as many bits clearly pay, even on a slow core.
    plan = _planned(tmp_path, monkeypatch, 2 * _SLOW, "5%", _SGD)
    rules = plan.plan.decisions.rules
    coded = {(r.trade, getattr(r, "format", "")) for r in rules if r.trade in _TRADES}
    assert coded
    assert coded <= {("quantized_gradients", "bfloat16"), ("low_rank_gradients", "")}
    assert "probe: 10 steps" in plan.predicted.accuracy_loss
    refused = {r.label: r.reason for r in plan.plan.refused if r.trade in _TRADES}
    for bits in (8, 2):
        assert "no C++ compiler" in refused[f"gradients in {bits} bits"]
