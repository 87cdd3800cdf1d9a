"""Laws for every trade on real models; each trade in the list is found automatically.

Not for what a single trade does: see its own file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from steelyard.ir.program import Program
from steelyard.ir.rule import BETWEEN_RANKS
from steelyard.plans.trade import Offer, Trade
from steelyard.predict import step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.predict.step import PEAK_SHARE
from steelyard.trades import TRADES
from tests import zoo
from tests.harness import (
    DEVICE,
    FAR_LINKS,
    Outcome,
    Trial,
    costs_of,
    predicted_above,
    trial_of,
)
from tests.torch.trades.test_chunk import LOSSES, Scores, assert_same, ids
from tests.zoo.workers import on_its_worker

pytestmark = pytest.mark.slow

MODELS = (
    "mlp",
    "gpt",
    "moe",
    "lstm",
    "resnet_bn",
    "hf_gpt2",
    "hf_t5",
    "edge_tied_module",
    "edge_frozen_first_block",
    "edge_dropout_variants",
    "edge_buffer_written",
    "edge_inplace_views",
    "edge_instance_norm_tracked",
    "edge_random_draws",
    "edge_sort",
    "many_words",
    "early_table",
)
# Tracing again takes seconds; these models have repeated blocks, operators with several results,
# and neither.
TRACED_TWICE = ("gpt", "resnet_bn", "edge_tied_module", "many_words")
# The captured step decomposes a fused operator of eager PyTorch, which rounds differently.
NOT_LIKE_EAGER = ("lstm",)
# Each offer costs a run of the model or a capture: test the widest, the narrowest, and one between
# them.
_OFFERS = 3
# The loss of the earlier micro-batches, and the size to which kernels round their workspace up.
_SMALL_CHANGE_BYTES = 64
_AMOUNTS = ("accuracy", "memory", "communication", "computation")


class EarlyTable(nn.Module):
    """A model that computes a table first and reads it last; the memory peak is between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.rand(512, 512))
        self.body = nn.Sequential(nn.Linear(16, 2048), nn.Tanh(), nn.Linear(2048, 512))
        self.body.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table * 2
        return (self.body(x) * self.scale) @ table


def _mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model(batch)
    return made.square().mean()


# Samples for trades to which the models of the zoo, all of them small, give no occasion.
_SAMPLES: dict[str, Callable[[], zoo.Sample]] = {
    "many_words": lambda: (Scores(), LOSSES["mean"], ids().clamp(min=0)),
    "early_table": lambda: (EarlyTable(), _mean_square, torch.rand(256, 16)),
}


def trial(name: str) -> Trial:
    return _trial_of_sample(name) if name in _SAMPLES else trial_of(name)


@functools.cache
def _trial_of_sample(name: str) -> Trial:
    return Trial(*_made(name))


def _made(name: str) -> zoo.Sample:
    if name not in _SAMPLES:
        return zoo.case(name).make()
    torch.manual_seed(0)
    return _SAMPLES[name]()


@functools.cache
def unplanned(name: str) -> Outcome:
    return trial(name).run(trial(name).plain)


def offers(trade: Trade, name: str) -> list[Offer]:
    """Return a few of the trade's offers on this model, spread over all of them."""
    tried = trial(name)
    found, refusals = trade.offers(tried.plain, tried.source)
    assert found or refusals, "a trade that offers nothing says why"
    for refusal in refusals:
        assert refusal.trade == trade.name
        assert refusal.reason
    ordered = sorted(found, key=lambda o: (-sum(getattr(r, "count", 1) for r in o.rules), o.label))
    places = {i * (len(ordered) - 1) // max(1, _OFFERS - 1) for i in range(_OFFERS)}
    return [ordered[place] for place in sorted(places)] if ordered else []


def rewritten(trade: Trade, name: str) -> Iterator[tuple[Offer, Program]]:
    for offer in offers(trade, name):
        yield offer, trade.rewrite(trial(name).plain, offer.rules, trial(name).source)


@functools.cache
def applied(trade: Trade, name: str) -> tuple[tuple[Offer, Program], ...]:
    return tuple(rewritten(trade, name))


@functools.cache
def traced_again(name: str) -> Trial:
    return Trial(*_made(name))


every_model = pytest.mark.parametrize("name", [on_its_worker(name) for name in MODELS])
# These tests have no optimizer and one rank. tests/system/offload/test_optimizer_state.py and
# tests/system/dist/test_planned.py check the same for the other trades, including bytes.
OF_THE_PASS = [
    trade
    for trade in TRADES
    if trade.name != "offload_state" and trade.rule.stage not in BETWEEN_RANKS
]
every_trade = pytest.mark.parametrize("trade", OF_THE_PASS, ids=lambda t: t.name)


@every_trade
def test_a_trade_declares_its_payments_and_gains(trade: Trade) -> None:
    assert trade.buys  # a new order of the same calls may pay nothing
    assert trade.pays
    assert set(trade.pays) | set(trade.buys) <= set(_AMOUNTS)
    assert not set(trade.pays) & set(trade.buys)
    assert trade.is_exact == ("accuracy" not in trade.pays)
    assert [t.name for t in TRADES].count(trade.name) == 1


@every_trade
@every_model
def test_a_rewrite_is_pure_and_valid(trade: Trade, name: str) -> None:
    plain = trial(name).plain
    before = plain.instructions
    for _, program in rewritten(trade, name):
        assert program.problems() == []
        assert program.graph.problems() == []
        sinks = [(i.sink.kind, i.sink.target) for i in program.instructions if i.sink]
        assert sorted(sinks) == sorted((i.sink.kind, i.sink.target) for i in before if i.sink)
    assert plain.instructions == before
    assert trade.rewrite(plain, (), trial(name).source) is plain


@every_trade
@pytest.mark.parametrize("name", [on_its_worker(name) for name in TRACED_TWICE])
def test_rules_apply_to_any_trace_of_the_model(trade: Trade, name: str) -> None:
    again = traced_again(name)
    for offer, program in applied(trade, name):
        there = trade.rewrite(again.plain, offer.rules, again.source)
        assert there.instructions == program.instructions


@every_trade
@every_model
def test_no_offer_improves_what_its_trade_pays(trade: Trade, name: str) -> None:
    programs = [program for _, program in applied(trade, name)]
    if not programs:
        pytest.skip(f"{trade.name} offers nothing on this model")
    plain = trial(name).plain
    costs = costs_of(plain.graph, *(p.graph for p in programs))
    if "computation" in trade.pays:
        seconds = step_seconds(plain, costs).value
        assert all(step_seconds(p, costs).value >= seconds for p in programs)


@every_trade
@pytest.mark.xdist_group("gpt")
def test_a_trade_improves_what_it_buys_on_most_models(trade: Trade) -> None:
    """It need not improve every model: if parameters dominate memory, there may be nothing to
    save."""
    bought = asked = 0
    for name in ("gpt", "moe", "resnet_bn", "edge_dropout_variants", *_SAMPLES):
        tried, costs = trial(name), CostTable(device=DEVICE, links=FAR_LINKS)
        found, _ = trade.offers(tried.plain, tried.source)
        programs = [trade.rewrite(tried.plain, o.rules, tried.source) for o in found]
        asked += bool(programs)
        if "memory" in trade.buys:
            # Resident memory is excluded: the pieces in which values are moved are larger than such
            # small models.
            least = min((predicted_above(p, costs) for p in programs), default=1 << 60)
            bought += least < predicted_above(tried.plain, costs)
    assert asked
    assert bought >= asked / 2


@every_trade
@every_model
def test_results_are_unchanged_and_the_peak_is_predicted(trade: Trade, name: str) -> None:
    """Loss, gradients and buffers are equal to the bit, including random masks and running
    statistics."""
    for offer, program in applied(trade, name):
        outcome = trial(name).run(program)
        if trade.is_exact:
            same = unplanned(name)
            if program.repeats > 1:
                # The sum has another order, so the result is compared with eager PyTorch
                # accumulating in the same order.
                if name in NOT_LIKE_EAGER:
                    continue
                same = trial(name).eager(micro_batches=program.repeats)
            is_whole = not any(getattr(rule, "slices", 0) for rule in offer.rules)
            if trade.is_bitwise or is_whole or program.repeats > 1:
                assert outcome.difference(same) is None, offer.label
            else:
                assert_same(same, outcome)
        predicted = predicted_above(program, costs_of(program.graph))
        allowed = max(_SMALL_CHANGE_BYTES, PEAK_SHARE * predicted)
        assert abs(outcome.peak_bytes - predicted) <= allowed, offer.label
