"""Pipelines: the offers, the text of the plan, and the predictions.

For the results of such programs on live ranks, see tests/system/dist.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from steelyard.errors import BadInput
from steelyard.ir.collective import GLOO_GETS, GLOO_SENDS
from steelyard.ir.graph import Phase
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import Rule
from steelyard.passes.pipeline.stage_boundaries import balanced_ends, possible_ends
from steelyard.predict import peak_bytes, predict, step_seconds
from steelyard.search import SearchResult
from steelyard.trades.recompute import RecomputeRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.trades.shard_pipeline import SCHEDULES, rules_for
from steelyard.trades.shard_states import ShardStates
from tests.support.declared import costs
from tests.support.in_stages import InStages
from tests.unit.graphs.stored import stored_step

SOURCE = stored_step("gpt-4-blocks")
STEP = InStages(plain=SOURCE.plain, source=SOURCE)
applied, stages, offered = STEP.applied, STEP.stages, STEP.offered


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_schedule_is_offered_on_stages_of_its_own(ranks: int) -> None:
    found = offered(ranks)
    assert found.keys() == SCHEDULES.keys()
    for schedule, rules in found.items():
        assert len(rules) == ranks * SCHEDULES[schedule] - 1
        assert {rule.behind for rule in rules} <= set(possible_ends(SOURCE.plain.graph))
        program = applied(*rules, micro_batches=2 * ranks if schedule != "GPipe" else 1)
        assert program.problems() == []
        assert program.layout == ParallelLayout(pipeline=ranks)
        assert program.pipeline is not None
        assert program.pipeline.order.num_stages == len(rules) + 1


def test_replica_groups_of_stages_reduce_after_all_micro_batches() -> None:
    """Each group sends half as many activations as a single group would; then every gradient is
    sent, with the loss."""
    rules = rules_for(["blocks.1"], schedule="1F1B", ranks=2)
    shared = ShardBatchRule(ranks=2, bucket=1024)
    one, two = (applied(*more, *rules, micro_batches=2) for more in ((), (shared,)))
    assert two.layout == ParallelLayout(data=2, pipeline=2)
    assert not any(node.collective for node in two.graph.nodes)
    assert two.pipeline is not None
    held = [two.pipeline.held(rank) for rank in range(2)]
    sizes = {n.name: n.outputs[0].nbytes for n in two.graph.inputs() if n.outputs}
    gradients = [sum(sizes[n] for n in own if n.startswith("parameter:")) for own in held]
    alone = predict(one, costs()).metrics.communication_bytes.value
    sent = predict(two, costs()).metrics.communication_bytes.value
    # The stages exchange the gradient of the tied weight once, for any number of samples; a ring of
    # two ranks sends exactly its bytes.
    (tied,) = (sizes[name] for name in held[0] & held[1] if name.startswith("parameter:"))
    # Gloo's headers are added: 576 bytes for each gradient; for two messages in each direction, the
    # same as without groups; and for the loss, which one rank sums and sends on.
    messages, told = 2 * (GLOO_SENDS + GLOO_GETS), 4 + GLOO_SENDS
    handed = (alone - (tied + 576) - messages - told) // 2 + messages + tied + 576
    named = [sum(name.startswith("parameter:") for name in own) for own in held]
    summed = [nbytes + 576 * count for nbytes, count in zip(gradients, named)]
    assert sent == max(handed + summed[0] + GLOO_GETS, handed + summed[1] + told + 4 + 144)


def of_two_groups() -> tuple[Rule, ...]:
    shared = ShardBatchRule(ranks=2, bucket=1024)
    return shared, *rules_for(["blocks.1"], schedule="1F1B", ranks=2)


def states() -> tuple[Rule, ...]:
    among = replace(SOURCE.plain, layout=ParallelLayout(data=2))
    return tuple(r for offer in ShardStates().offers(among, SOURCE)[0] for r in offer.rules)


@pytest.mark.parametrize("otherwise", [{"gathers": 2}, {"bucket": 1 << 20}])
def test_stages_refuse_to_gather_weights_twice_or_in_buckets(otherwise: dict[str, int]) -> None:
    rules = (replace(r, **otherwise) for r in states())
    with pytest.raises(BadInput, match="twice a step or in buckets") as refused:
        applied(*of_two_groups(), *rules, micro_batches=2)
    assert len(str(refused.value).splitlines()) == 3


def test_stages_execute_every_instruction_once() -> None:
    """The stages together execute them, including recomputed ones."""
    again = RecomputeRule(module="blocks.*.mlp.act", op="aten.gelu.default", count=4)
    for more in ((), (again,)):
        rules = rules_for(["blocks.0", "blocks.2"], schedule="Interleaved1F1B", ranks=2)
        rules += rules_for(["norm"], schedule="Interleaved1F1B", ranks=2)
        program = applied(*rules, *more)
        assert program.pipeline is not None
        parts = [p for s in program.pipeline.stages.stages for p in (s.forward, s.backward)]
        done = Counter(n.op for part in parts for n in part.nodes if not n.is_free)
        alone = applied(*more)
        nodes = alone.graph.by_name
        lines = [nodes[i.node] for i in alone.instructions if i.sink is None]
        expected = Counter(n.op for n in lines if not n.is_free)
        # An exchange adds up the gradients of one weight from two stages.
        expected["aten.add.Tensor"] -= len(program.pipeline.stages.shared)
        # Each stage may compute cheap values, such as masks, for itself.
        for op, count in expected.items():
            assert done[op] >= count, op
        assert sum(n.flops for p in parts for n in p.nodes) == sum(n.flops for n in lines)
    gelus = sum(n.op == "aten.gelu.default" for p in parts for n in p.nodes)
    assert gelus == 8


def test_only_results_read_later_are_kept_between_stages() -> None:
    """A norm returns the gradients of its input and of its weights together; the former is read
    at once."""
    rules = rules_for(["blocks.0", "blocks.1", "blocks.2"], schedule="ZBVZeroBubble", ranks=2)
    program = applied(*rules)
    assert program.pipeline is not None
    stages = program.pipeline.stages
    nodes = [stages.graph.by_name[n] for s in stages.stages for n in s.kept_between]
    assert any(node.is_getitem for node in nodes)
    assert not [node.op for node in nodes if len(node.outputs) > 1]


def test_recomputation_lowers_the_peak_of_stages() -> None:
    again = RecomputeRule(module="blocks.*.mlp.act", op="aten.gelu.default", count=4)
    rules = rules_for(["blocks.1"], schedule="1F1B", ranks=2)
    before, after = applied(*rules), applied(*rules, again)
    assert peak_bytes(after, costs()) < peak_bytes(before, costs())
    assert step_seconds(after, costs()).value > step_seconds(before, costs()).value


def test_stages_are_as_equal_as_modules_allow() -> None:
    graph = SOURCE.plain.graph

    def weight(node: object) -> float:
        return float(getattr(node, "flops", 0))

    (end,) = balanced_ends(graph, 2, weight=weight, handing=lambda _: 0.0)
    place = [n.name for n in graph.forward()].index(
        [n.name for n in graph.forward() if n.path == end or n.path.startswith(f"{end}.")][-1]
    )
    forward = [weight(n) for n in graph.forward()]
    first = sum(forward[: place + 1])
    assert 0.4 * sum(forward) < first < 0.6 * sum(forward)
    assert any(n.phase is Phase.BACKWARD for n in graph.nodes)
    assert balanced_ends(graph, 200, weight=weight, handing=lambda _: 0.0) == ()


def trades_of(found: SearchResult) -> set[str]:
    return {rule.trade for rule in found.rules}
