"""Tensor parallelism: the offers, the rules of a plan, and the choice.

For the results of such programs on live ranks, see tests/system/dist/test_planned.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from steelyard.errors import BadInput, Infeasible, Mismatch
from steelyard.hardware.link import Link
from steelyard.ir.collective import Exchange
from steelyard.ir.graph import Role
from steelyard.ir.optimizer_update import WEIGHT
from steelyard.ir.parallel_layout import TENSOR, ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.plans.budget import Budget
from steelyard.predict.collectives.host_groups import RanksPerHost
from steelyard.predict.cost_table import CostTable
from steelyard.run.sharded_model.tensors import why_unshardable
from steelyard.search import LayoutSearch, StepSearch
from steelyard.trades import TRADES
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.trades.shard_states import ShardStates, ShardStatesRule
from steelyard.trades.shard_tensor import ShardTensor, ShardTensorRule
from tests.harness import Trial
from tests.support.declared import costs
from tests.support.short_search import looking_less_far
from tests.support.torch_since import torch_since
from tests.torch.trades.test_shard_batch import ranks_of, shared, trial

pytestmark = [
    pytest.mark.slow,
    torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12"),
]

UP, DOWN = "blocks.*.mlp.up", "blocks.*.mlp.down.weight"
MLP = tuple(
    ShardTensorRule(parameter=name, ranks=2, dim=dim, count=2)
    for name, dim in ((f"{UP}.weight", 0), (f"{UP}.bias", 0), (DOWN, 1))
)


def among(layout: ParallelLayout) -> Program:
    return replace(trial().plain, layout=layout)


def states(degree: int, module: str = f"{UP}.weight", count: int = 2) -> Rule:
    return ShardStatesRule(parameter=module, ranks=degree, count=count)


def batch(degree: int) -> Rule:
    return ShardBatchRule(ranks=degree, bucket=1 << 20)


def test_regions_are_offered_as_a_whole_cheapest_first() -> None:
    offers, refusals = ShardTensor().offers(among(ParallelLayout(tensor=2)), trial().source)
    assert not refusals
    found = {frozenset((rule.parameter, rule.dim, rule.groups) for rule in o.rules) for o in offers}
    assert frozenset({(f"{UP}.weight", 0, 1), (f"{UP}.bias", 0, 1), (DOWN, 1, 1)}) in found
    heads = {("blocks.*.attention.qkv.weight", 0, 3), ("blocks.*.attention.out.weight", 1, 1)}
    assert any(heads <= offer for offer in found), found
    assert any(("token.weight", 0, 1) in offer for offer in found), "a vocabulary"
    assert all(rule.count == 2 for o in offers for rule in o.rules if "*" in rule.parameter)
    # Each offer can be applied alone, and leaves fewer bytes of weights on a rank.
    whole = trial().plain.graph.resident_bytes(Role.PARAMETER)
    for offer in offers:
        program = trial().apply_rules(offer.rules)
        assert program.problems() == []
        assert program.layout.axes == {TENSOR: 2}
        assert program.sent_bytes > 0
        assert program.graph.resident_bytes(Role.PARAMETER) < whole


def test_nothing_is_offered_on_one_rank() -> None:
    for trade in (ShardTensor(), ShardStates()):
        assert trade.offers(trial().plain, trial().source) == ((), ())


def test_sharded_weights_are_gathered_and_their_gradients_reduce_scattered() -> None:
    offers, refusals = ShardStates().offers(among(ParallelLayout(data=2)), trial().source)
    assert not refusals
    assert f"{UP}.weight (2)" in {offer.label for offer in offers}
    plain, some = shared(2), shared(2, states(2))
    assert plain.shardings == ()
    up = 4 * 32 * 128
    resident = [p.graph.resident_bytes(Role.PARAMETER) for p in (plain, some)]
    assert resident[0] - resident[1] == 2 * up // 2
    # The all-reduce around a ring becomes a gather and a scatter, half each.
    assert some.sent_bytes == plain.sent_bytes
    kinds = [node.collective.kind for node in some.graph.nodes if node.collective is not None]
    assert (kinds.count(Exchange.ALL_GATHER), kinds.count(Exchange.REDUCE_SCATTER)) == (2, 2)


def test_prefetched_collectives_are_issued_earlier_and_awaited_at_the_same_place() -> None:
    saved_for_backward = [OverlapRule(window=1, ahead=lead) for lead in (0, 4)]
    late, soon = (shared(2, states(2), rule) for rule in saved_for_backward)
    assert late.sent_bytes == soon.sent_bytes
    distance = [_lines_between(program) for program in (late, soon)]
    assert distance[1] > distance[0]


def _lines_between(program: Program) -> int:
    nodes = program.graph.by_name
    gathers = [
        exchange
        for exchange in program.exchanges
        if "gather" in nodes[program.instructions[exchange.issue].node].op
    ]
    return sum(e.wait - e.issue for e in gathers if e.wait is not None)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ((replace(MLP[0], count=3),), "matches 2 tensors"),
        ((replace(MLP[0], parameter="blocks.*.mlp.upwards"),), "matches 0 tensors"),
        ((MLP[0], replace(MLP[0], dim=1)), "sharded by two shard_tensor rules"),
        ((replace(MLP[0], ranks=3),), "cannot be sharded as"),
        ((replace(MLP[0], dim=7),), "cannot be sharded as"),
        ((states(2),), "but the batch over 1"),
        ((states(4), batch(2)), "over 4 ranks, but the batch over 2"),
        ((states(2, count=1), batch(2)), "matches 2 parameters"),
        ((states(8, "position.weight", 1), batch(8)), None),
        ((states(2, f"{UP}.bias"), batch(2)), None),
    ],
)
def test_an_impossible_plan_is_refused(rules: tuple[Rule, ...], said: str | None) -> None:
    if said is None:
        assert trial().apply_rules(rules).problems() == []
        return
    with pytest.raises(BadInput, match=said) as refused:
        trial().apply_rules(rules)
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize(
    "optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Rprop"]
)
def test_elementwise_optimizers_work_on_shards(optimizer: str) -> None:
    assert why_unshardable(functools.partial(getattr(torch.optim, optimizer), lr=0.1)) == ""


def test_an_optimizer_that_needs_whole_tensors_is_refused() -> None:
    reason = why_unshardable(functools.partial(torch.optim.Adafactor, lr=0.1))
    assert reason == "the optimizer's step gives other results on a shard of a parameter"
    source = trial().source
    update = replace(trial().plain, loss="", unshardable=reason)
    for trade, layout in (
        (ShardTensor(), ParallelLayout(tensor=2)),
        (ShardStates(), ParallelLayout(data=2)),
    ):
        program = replace(among(layout), update=update)
        offers, (refusal,) = trade.offers(program, source)
        assert not offers
        assert refusal.reason == reason
        rules = MLP if layout.tensor > 1 else (states(2),)
        with pytest.raises(Mismatch, match="other results on a shard of a parameter"):
            trade.rewrite(program, rules, source)


# The layers could also be split over ranks: see test_shard_pipeline.py.
WITHOUT_STAGES = tuple(trade for trade in TRADES if trade.name != "shard_pipeline")


def layouts(
    price: CostTable, model: Trial, *, num_ranks: int, update: Program | None = None
) -> LayoutSearch:
    plain = replace(model.plain, update=update)

    def searching(layout: tuple[Rule, ...]) -> StepSearch:
        return StepSearch(
            plain, trades=WITHOUT_STAGES, source=model.source, costs=price, layout=layout
        )

    return LayoutSearch(
        plain, trades=WITHOUT_STAGES, source=model.source, costs=price, num_ranks=num_ranks,
        searching=searching,
    )  # fmt: skip


@looking_less_far()
def test_tensor_parallelism_saves_memory_that_data_parallelism_does_not() -> None:
    among_two = layouts(costs(1e12), trial(), num_ranks=2)
    free = among_two.find(Budget())
    assert {rule.trade for rule in free.rules} == {"overlap", "shard_batch"}
    reasons = {r.label: r.reason for r in free.refused if r.trade == "shard_tensor"}
    assert "takes ~" in reasons["sharded over 2 ranks"]
    shared_out = [
        among_two.search_by(way.rules)
        for way in among_two.candidates.of(ParallelLayout(data=2))
        if not any(rule.trade == "shard_states" for rule in way.rules)
    ]
    with pytest.raises(Infeasible) as least:
        shared_out[0].find(Budget(memory_bytes=1))
    assert least.value.least_bytes is not None
    budget = Budget(memory_bytes=int(0.9 * least.value.least_bytes))
    tight = among_two.find(budget)
    assert ranks_of(tight) == 2
    assert tight.prediction.peak.nbytes <= 0.9 * least.value.least_bytes
    assert {"shard_states", "shard_tensor"} & {rule.trade for rule in tight.rules}
    assert {"shard_states", "shard_tensor"} & {taken.trade for taken in tight.taken}


def test_weights_are_gathered_for_each_pass_where_memory_is_short() -> None:
    among_two = layouts(costs(1e12), trial(), num_ranks=2)
    shared = [way for way in among_two.candidates.of(ParallelLayout(data=2)) if _gathers(way.rules)]
    once, twice = ([w for w in shared if _gathers(w.rules) == count] for count in (1, 2))
    assert min(w.nbytes for w in twice) < min(w.nbytes for w in once)
    assert min(w.seconds for w in twice) > min(w.seconds for w in once)


def _gathers(rules: tuple[Rule, ...]) -> int:
    return max((rule.gathers for rule in rules if rule.trade == "shard_states"), default=0)


def test_rows_that_divide_only_before_tensor_parallelism_are_not_sharded_again() -> None:
    """A classifier has ten rows; two ranks that shard tensors leave five, which two more ranks
    do not divide."""
    layers = nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    batch = torch.randn(256, 512), torch.randint(10, (256,))
    model = Trial(
        nn.Sequential(*layers), lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), batch
    )
    model.source.optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    # Here updates take longer than the exchanges.
    among_four = layouts(costs(1e12), model, num_ranks=4, update=model.source.update())
    fastest = min(among_four.candidates.of(ParallelLayout(data=2)), key=lambda way: way.seconds)
    assert "4.weight" in _named(fastest.rules, "shard_states")
    ways = among_four.candidates.of(ParallelLayout(data=2, tensor=2))
    cut = [way.rules for way in ways if "4.weight" in _named(way.rules, "shard_tensor")]
    in_both = [rules for rules in cut if _named(rules, "shard_states")]
    assert in_both
    assert not any("4.weight" in _named(rules, "shard_states") for rules in in_both)
    assert all(len(set(rules)) == len(rules) for rules in in_both)


def _named(rules: tuple[Rule, ...], trade: str) -> set[str]:
    return {rule.parameter for rule in rules if rule.trade == trade}


def test_replica_groups_on_separate_hosts_reduce_over_the_link_between_hosts() -> None:
    """With four ranks on two hosts, the ranks that share the batch are on different hosts.

    Their bucket is the best one for that link, and the saving is reported, too.
    """
    near = Link(kind="near", latency_seconds=1e-6, bytes_per_second=1e12)
    price = replace(costs(1e7), spread=RanksPerHost(num_ranks=4, each=2, near=near))
    gradients = sum(
        n.outputs[0].nbytes for n in trial().plain.graph.inputs() if n.name.startswith(WEIGHT)
    )
    among_four = layouts(price, trial(), num_ranks=4)
    way = min(
        among_four.candidates.of(ParallelLayout(data=2, tensor=2)), key=lambda way: way.seconds
    )
    told = [
        taken
        for taken in among_four.explanation.selected_trades(way)
        if taken.trade == "shard_batch"
    ]
    assert told[0].pays_seconds > gradients / 1e7
    of_one_host = min(among_four.candidates.of(ParallelLayout(data=2)), key=lambda way: way.seconds)
    told = [
        taken
        for taken in among_four.explanation.selected_trades(of_one_host)
        if taken.trade == "shard_batch"
    ]
    assert told[0].pays_seconds < 0.01 * gradients / 1e7
