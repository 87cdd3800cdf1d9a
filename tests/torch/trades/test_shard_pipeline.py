"""Pipelines: searches over all layouts, and stages combined with other requests to a capture.

Not for what a stored step can show: see tests/unit/trades/test_shard_pipeline.py. For the results
of such programs on live ranks, see tests/system/dist.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from steelyard.errors import BadInput, Infeasible
from steelyard.ir.graph import Phase, Role
from steelyard.ir.parallel_layout import TENSOR, ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, matching, to_rules
from steelyard.plans.budget import Budget
from steelyard.plans.trade import apply_rules
from steelyard.predict import peak_bytes, predict, step_seconds
from steelyard.search import LayoutSearch, PipelineSearch, SearchResult, StepSearch
from steelyard.trades import TRADES
from steelyard.trades.recompute import Recompute, RecomputeRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.trades.shard_pipeline import ShardPipeline, rules_for
from steelyard.trades.shard_tensor import ShardTensor
from tests.harness import Trial
from tests.support.declared import costs
from tests.support.in_stages import InStages
from tests.support.torch_since import torch_since
from tests.unit.trades.test_shard_pipeline import of_two_groups, states
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

pytestmark = pytest.mark.slow


@functools.cache
def trial() -> Trial:
    model = GPT(layers=4, width=32, heads=2, vocabulary=64, length=16, dropout=0.1)
    return Trial(model, next_token_loss, tokens(8, 16, 64))


@functools.cache
def plain() -> Program:
    source = trial().source
    source.optimizer = partial(torch.optim.AdamW, lr=1e-3)
    return Program.plain(source.graph(micro_batches=1), update=source.update())


@functools.cache
def step() -> InStages:
    return InStages(plain=plain(), source=trial().source)


def applied(*rules: Rule, micro_batches: int = 4) -> Program:
    return step().applied(*rules, micro_batches=micro_batches)


def offered(ranks: int) -> dict[str, tuple[Rule, ...]]:
    return step().offered(ranks)


def test_the_reason_for_no_stages_is_given() -> None:
    coupled = plain().update
    assert coupled is not None
    reason = "one norm over all parameters"
    whole = replace(plain(), update=replace(coupled, undivided=reason))
    for program, said in (
        (whole, reason),
        (replace(plain(), layout=ParallelLayout(data=2, shares=(3, 1))), "need equal shares"),
    ):
        among = replace(program, layout=replace(program.layout, pipeline=2))
        offers, (refusal,) = ShardPipeline().offers(among, trial().source)
        assert not offers
        assert said in refusal.reason
    few = Trial(nn.Linear(4, 4), lambda m, b: m(b["x"]).sum(), {"x": torch.randn(4, 4)})
    among = replace(few.plain, layout=ParallelLayout(pipeline=2))
    _, (refusal,) = ShardPipeline().offers(among, few.source)
    assert refusal.reason == "the model has too few modules for 2 stages"


def test_groups_share_the_batch_equally_or_not_at_all() -> None:
    rule = ShardBatchRule(ranks=2, bucket=1024, shares=(3, 1))
    with pytest.raises(BadInput, match="need equal shares of the batch"):
        applied(rule, *rules_for(["blocks.1"], schedule="1F1B", ranks=2), micro_batches=2)


def test_replica_groups_of_stages_can_shard_their_states() -> None:
    """Weights are gathered once a step and are whole during the passes only, and so are their
    gradients."""
    without = applied(*of_two_groups(), micro_batches=2)
    shared = applied(*of_two_groups(), *states(), micro_batches=2)
    assert not any(node.collective for node in shared.graph.nodes)
    assert shared.pipeline is not None
    sizes = {n.name: n.outputs[0].nbytes for n in shared.graph.inputs() if n.outputs}
    held = [shared.pipeline.held(rank) & shared.in_shares for rank in range(2)]
    whole = [sum(sizes[name] for name in names) for names in held]
    before, after = predict(without, costs(1e6)), predict(shared, costs(1e6))
    # Half of each weight and half of its gradient are sent in place of the gradient around a ring:
    # as many bytes, with fewer headers of gloo.
    saved = before.metrics.communication_bytes.value - after.metrics.communication_bytes.value
    assert saved in [288 * len(names) for names in held]
    assert saved > 0
    seconds = [p.metrics.step_seconds.value for p in (before, after)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.01)
    # A rank saves half of each weight and half of Adam's two moments; during the passes it holds
    # the gathered weight.
    assert before.peak.nbytes - after.peak.nbytes >= min(whole) // 2
    assert any(h.what == "gathered weights" for h in after.peak.alive)


def test_states_are_sharded_where_memory_is_short() -> None:
    def searching(layout: tuple[Rule, ...]) -> StepSearch:
        return StepSearch(plain(), trades=TRADES, source=trial().source, costs=price, layout=layout)

    price = costs(1e6)

    staged = PipelineSearch(
        plain(), layout=ParallelLayout(data=2, pipeline=2), trades=TRADES, source=trial().source,
        costs=price, searching=searching,
    )  # fmt: skip
    with pytest.raises(Infeasible) as least:
        staged.find(Budget(memory_bytes=1))
    found = staged.find(Budget(memory_bytes=least.value.least_bytes))
    assert found is not None
    assert "shard_states" in trades_of(found)
    (taken,) = (taken for taken in found.taken if taken.trade == "shard_states")
    assert taken.buys_bytes > 0
    # As many bytes are sent as for gradients around a ring.
    assert taken.pays_seconds == pytest.approx(0, abs=1e-9)
    assert sorted(rule for taken in found.taken for rule in taken.rules) == sorted(found.rules)


@torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12")
def test_the_ranks_of_a_stage_can_be_tensor_parallel() -> None:
    """A collective and its wait are in one stage, and each is issued and waited for once."""
    among = replace(plain(), layout=ParallelLayout(tensor=2))
    cut = ShardTensor().offers(among, trial().source)[0][0].rules
    rules = rules_for(["blocks.1"], schedule="1F1B", ranks=2)
    alone, partition = (applied(*more, *cut) for more in ((), rules))
    assert partition.layout == ParallelLayout(pipeline=2, tensor=2)
    assert partition.pipeline is not None
    stages = partition.pipeline.stages.stages
    found = Counter()
    for part in (part for s in stages for part in (s.forward, s.backward)):
        issued = [n for n in part.nodes if n.collective]
        assert {n.waits_for for n in part.nodes if n.waits_for} == {n.name for n in issued}
        found.update(n.name for n in issued)
    assert found == Counter(n.name for n in alone.graph.nodes if n.collective)
    for split in (s for s in stages if any(n.collective for n in s.backward.nodes)):
        both = [n for part in (split.back_to_inputs, split.back_to_weights) for n in part.nodes]
        assert sum(bool(n.collective) for n in both) == sum(
            bool(n.collective) for n in split.backward.nodes
        )
    # Each rank holds a part of a weight, of its gradient, and of the optimizer state.
    whole = predict(stages_alone := applied(*rules), costs())
    part = predict(partition, costs())
    assert part.peak.resident_bytes < 0.9 * whole.peak.resident_bytes
    assert stages_alone.pipeline is not None
    for mine, other in zip(partition.pipeline.updates, stages_alone.pipeline.updates, strict=True):
        assert mine.graph.resident_bytes(Role.STATE) < other.graph.resident_bytes(Role.STATE)


@torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12")
def test_slow_exchanges_within_a_stage_are_waited_for() -> None:
    among = replace(plain(), layout=ParallelLayout(tensor=2))
    cut = ShardTensor().offers(among, trial().source)[0][0].rules
    rules = rules_for(["blocks.1"], schedule="1F1B", ranks=2)
    program = applied(*cut, *rules)
    sent = sum(n.collective.sent_bytes for n in program.graph.nodes if n.collective)
    fast, slow = costs(1e12), costs(1e12)
    link = replace(slow.links[TENSOR], bytes_per_second=1e4)
    slow = replace(slow, links={**slow.links, TENSOR: link})
    before, after = (predict(program, c).metrics for c in (fast, slow))
    assert before.computation_seconds.value == pytest.approx(after.computation_seconds.value)
    assert before.communication_bytes == after.communication_bytes
    # At least half of one stage's exchanges are exposed, in each of four micro-batches.
    assert after.step_seconds.value - before.step_seconds.value > 4 * sent / 2 / 1e4


def test_a_recomputed_norm_reads_the_old_values_of_its_buffers() -> None:
    """No stage treats the copy as a buffer of the model."""
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8)]
    source = Trial(nn.Sequential(*layers), _squares, {"x": torch.randn(8, 8)}).source
    alone = Program.plain(source.graph(micro_batches=1))
    offered = {rule for offer in Recompute().offers(alone, source)[0] for rule in offer.rules}
    again = to_rules(alone.graph, matching(alone.graph, sorted(offered)), RecomputeRule)
    rules = (*rules_for(("2",), schedule="GPipe", ranks=2), *again)
    program = apply_rules(alone, rules, trades=TRADES, source=source)
    pipeline = program.pipeline
    assert pipeline is not None
    norms = [n for n in pipeline.stages.graph.nodes if "batch_norm" in n.op]
    assert any(n.phase is Phase.BACKWARD and "backward" not in n.op for n in norms)
    of_model = {n.name for n in program.graph.inputs()}
    assert all(set(stage.held) <= of_model for stage in pipeline.stages.stages)
    assert peak_bytes(program, costs()) > 0


def _squares(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    result: Tensor = model(batch["x"]).square().mean()
    return result


@functools.cache
def little(size: int = 8) -> Trial:
    model = GPT(layers=2, width=32, heads=2, vocabulary=64, length=16)
    return Trial(model, next_token_loss, tokens(size, 16, 64))


@functools.cache
def layouts(rate: float, *, ranks: int = 2, size: int = 8) -> LayoutSearch:
    price, source, program = costs(rate), little(size).source, little(size).plain

    def searching(layout: tuple[Rule, ...]) -> StepSearch:
        return StepSearch(program, trades=TRADES, source=source, costs=price, layout=layout)

    return LayoutSearch(
        program, trades=TRADES, source=source, costs=price, num_ranks=ranks, searching=searching
    )


@torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12")
def test_pipelining_is_chosen_where_the_link_is_too_slow_for_gradients() -> None:
    """The weights take 200 KB, an activation of a micro-batch 4 KB."""
    found = layouts(1e7).find(Budget())
    assert ParallelLayout.of(found.rules) == ParallelLayout(pipeline=2)
    assert {"accumulate", "shard_pipeline"} <= trades_of(found)
    assert found.taken[0].trade == "shard_pipeline"
    assert found.taken[0].buys_bytes > 0
    assert found.taken[0].buys_seconds > 0
    labels = {refusal.label for refusal in found.refused}
    assert {"among 2 ranks", "sharded over 2 ranks"} <= labels
    assert any(label.endswith("on 2 ranks") and "F1B" in label for label in labels)
    # Two ranks are too few for stages of several ranks.
    assert not any("share tensors" in label for label in labels)


@torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12")
def test_tensor_parallel_stages_are_found() -> None:
    """Three samples have no equal shares for four ranks."""
    found = layouts(5e7, ranks=4, size=3).find(Budget())
    assert ParallelLayout.of(found.rules) == ParallelLayout(pipeline=2, tensor=2)
    assert [taken.trade for taken in found.taken] == ["shard_tensor", "shard_pipeline"]
    assert sorted(rule for taken in found.taken for rule in taken.rules) == sorted(found.rules)
    assert all(taken.buys_bytes > 0 and taken.buys_seconds > 0 for taken in found.taken)
    again = little(3).apply_rules(found.rules)
    assert step_seconds(again, costs(5e7)).value == found.prediction.metrics.step_seconds.value
    labels = {refusal.label for refusal in found.refused}
    assert {"sharded over 4 ranks", "layers on 4 ranks"} & labels


@torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12")
def test_stages_with_a_small_gain_are_not_taken() -> None:
    """The predicted waits of stages are the least certain part."""
    ways = layouts(1e8, ranks=4, size=3)
    found = ways.find(Budget())
    assert ParallelLayout.of(found.rules).pipeline == 1
    little = [
        r for r in found.refused if r.reason.startswith("saves less than a tenth of the step time")
    ]
    assert {r.trade for r in little} == {"shard_pipeline"}
    fastest = min(way.seconds for stages in ways.pipelines.values() for way in stages.candidates)
    step = found.prediction.metrics.step_seconds.value
    assert 0.9 * step <= fastest < step


def test_more_memory_is_never_slower_in_stages() -> None:
    staged = layouts(1e7).search_by(rules_for(["blocks.0"], schedule="1F1B", ranks=2))
    with pytest.raises(Infeasible) as least:
        staged.find(Budget(memory_bytes=1))
    low = least.value.least_bytes
    assert low is not None
    free = staged.find(Budget())
    assert free is not None
    high = free.prediction.peak.nbytes
    assert low < 0.9 * high
    limits = [low + (high - low) * step // 6 for step in range(7)]
    found = [staged.find(Budget(memory_bytes=limit)) for limit in limits]
    seconds = []
    for limit, answer in zip(limits, found, strict=True):
        assert answer is not None
        assert answer.prediction.peak.nbytes <= limit
        again = little().apply_rules(answer.rules)
        assert peak_bytes(again, costs(1e7)) == answer.prediction.peak.nbytes
        seconds.append(answer.prediction.metrics.step_seconds.value)
        assert limit > low or "recompute" in trades_of(answer)
    assert seconds == sorted(seconds, reverse=True)
    curve = staged.frontier()
    assert [p.step_seconds for p in curve] == sorted((p.step_seconds for p in curve), reverse=True)
    assert curve[0].memory_bytes == low


def test_the_leanest_of_indistinguishable_schedules_is_chosen_unless_time_is_bounded() -> None:
    staged = layouts(1e7).search_by(rules_for(["blocks.0"], schedule="1F1B", ranks=2))
    assert isinstance(staged, PipelineSearch)
    staged.explore_all()
    fastest = staged.frontier()[-1]
    found = staged.find(Budget())
    bounded = staged.find(Budget(step_seconds=fastest.step_seconds))
    quicker = staged.find(Budget(), within_seconds=fastest.step_seconds * (1 + 1e-9))
    assert found is not None
    assert bounded is not None
    assert quicker is not None
    assert found.prediction.peak.nbytes < fastest.memory_bytes
    seconds = found.prediction.metrics.step_seconds.value
    assert fastest.step_seconds < seconds < 1.06 * fastest.step_seconds
    # Nothing that fits is refused, and nothing slower is taken than what another search found.
    for one in (bounded, quicker):
        assert one.prediction.metrics.step_seconds.value == fastest.step_seconds
    told = [r.reason for r in found.refused if "cannot be distinguished" in r.reason]
    first = next(way for way in staged.candidates)
    assert bool(told) == (first.schedule != found.taken[0].label.split(", ")[1])


def test_too_few_micro_batches_are_refused() -> None:
    with pytest.raises(BadInput, match="1F1B does not support 1 micro-batches"):
        step().stages("blocks.1", micro_batches=1)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (rules_for(["blocks.9"], schedule="1F1B", ranks=2), "'blocks.9', which computes nothing"),
        (rules_for(["norm", "blocks.1"], schedule="1F1B", ranks=2), "3 stages on 2 ranks"),
        (rules_for(["blocks.1"], schedule="2F2B", ranks=2), "not supported by the schedule 2F2B"),
        (
            (*rules_for(["blocks.0"], schedule="1F1B", ranks=2),
             *rules_for(["blocks.1"], schedule="GPipe", ranks=2)),
            "have different ranks or schedules",
        ),
    ],
)  # fmt: skip
def test_an_impossible_plan_is_refused(rules: tuple[Rule, ...], said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        applied(*rules)
    assert len(str(refused.value).splitlines()) == 3


def trades_of(found: SearchResult) -> set[str]:
    return {rule.trade for rule in found.rules}
