"""Graphs with sparse embedding gradients: the same sums, fewer bytes, and the reasons against it
elsewhere."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from steelyard.capture.step import CapturedStep
from steelyard.comm.simulated_ranks import SimulatedRanks
from steelyard.errors import Mismatch
from steelyard.ir.collective import Exchange
from steelyard.ir.graph import OutputKind
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.plans.trade import apply_rules
from steelyard.run.codegen import emit
from steelyard.run.step import LiveStep
from steelyard.trades import TRADES
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.trades.sparse_gradients import SparseGradients, SparseGradientsRule

_BATCH, _LENGTH, _WORDS = 12, 6, 700


class Words(nn.Module):
    """A model with two tables: one of many words, and one with as many rows as there are
    positions."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.word = nn.Embedding(_WORDS, 32, padding_idx=0)
        self.place = nn.Embedding(_LENGTH, 32)
        self.inner = nn.Linear(32, 32)
        self.head = nn.Linear(32, _WORDS, bias=False)
        if tied:
            self.head.weight = self.word.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        result: Tensor = self.head(torch.tanh(self.inner(self.word(x) + self.place(places))))
        return result


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def _source(model: nn.Module) -> CapturedStep:
    torch.manual_seed(1)
    # Some words occur more often than others, on several ranks, and one is padding.
    x = torch.randint(0, _WORDS // 4, (_BATCH, _LENGTH)).square() % _WORDS
    batch = {"x": x, "y": torch.randint(0, _WORDS, (_BATCH, _LENGTH))}
    return CapturedStep(
        model=model, loss=_loss, batch=batch, optimizer=partial(torch.optim.SGD, lr=0.1)
    )


@pytest.fixture(scope="module")
def source() -> CapturedStep:
    torch.manual_seed(0)
    return _source(Words())


def _applied(source: CapturedStep, rules: list[Rule], *, parts: int = 1) -> Program:
    split = [AccumulateRule(micro_batches=parts)] if parts > 1 else []
    plain = Program.plain(source.graph(micro_batches=1))
    return apply_rules(plain, [*split, *rules], trades=TRADES, source=source)


def _shared(ranks: int, *, bucket: int = 1 << 20, lag: int = 2) -> list[Rule]:
    batch = ShardBatchRule(ranks=ranks, bucket=bucket)
    return [batch, OverlapRule(window=lag)]


_RULE = SparseGradientsRule(parameter="word.weight", format="rows")


@pytest.mark.parametrize("bucket", [1 << 10, 1 << 20])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_sums_are_those_of_one_device(
    source: CapturedStep, ranks: int, parts: int, bucket: int
) -> None:
    rules = _shared(ranks, bucket=bucket)
    whole, program = (_applied(source, each, parts=parts) for each in (rules, [*rules, _RULE]))
    assert not program.problems()
    assert not program.graph.problems()
    kinds = [program.graph.by_name[c].collective.kind for c in program.graph.collectives]
    assert kinds.count(Exchange.ALL_GATHER) == 2
    assert program.sent_bytes < 0.75 * whole.sent_bytes
    leaving = {o.target for o in program.graph.outputs if o.kind is OutputKind.GRADIENT}
    assert leaving == {o.target for o in whole.graph.outputs if o.kind is OutputKind.GRADIENT}
    together = SimulatedRanks(ranks)

    def gradients(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Words()
        channels = {"data": together.channel(rank)}
        step = LiveStep(
            model, program, constants=source.captured(micro_batches=program.units).constants,
            batch=source.batch, runner=partial(emit, channels=channels), rank=rank,
            channels=channels,
        )  # fmt: skip
        step.zero_grad()
        step.backward(source.batch)
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    found = together.run(gradients)
    torch.manual_seed(0)
    model = Words()
    _loss(model, source.batch).backward()
    for own in found:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(own[name], parameter.grad, atol=1e-6), name
            assert torch.equal(own[name], found[0][name]), name


def _why_not(model: nn.Module, ranks: int = 2) -> dict[str, str]:
    program = _applied(own := _source(model), _shared(ranks))
    assert program.layout == ParallelLayout(data=ranks)
    offers, refusals = SparseGradients().offers(program, own)
    found = {offer.rules[0].parameter: "" for offer in offers}
    return found | {r.label.removeprefix("rows of "): r.reason for r in refusals}


def test_offered_tables_and_the_reasons_for_others() -> None:
    told = _why_not(Words())
    assert told.pop("word.weight") == ""
    assert told == {"place.weight": "2 ranks look up 6 rows each, and the table has only 6"}
    assert "also read by other operators" in _why_not(Words(tied=True))["word.weight"]


class Twice(Words):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.word(x) + self.word(x.flip(1))))
        return result


def test_a_table_looked_up_twice_is_refused_once() -> None:
    own = _source(Twice())
    _, refusals = SparseGradients().offers(_applied(own, _shared(2)), own)
    assert [refusal.label for refusal in refusals] == ["rows of word.weight"]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (SparseGradientsRule(parameter="head.weight", format="rows"), "read only by one lookup"),
        (SparseGradientsRule(parameter="nothing.weight", format="rows"), "matches 0 parameters"),
        (
            SparseGradientsRule(parameter="word.weight", format="rows", count=2),
            "matches 1 parameters",
        ),
    ],
)
def test_impossible_rules_are_refused(source: CapturedStep, rule: Rule, said: str) -> None:
    with pytest.raises(Mismatch) as caught:
        _applied(source, [*_shared(2), rule])
    assert len(str(caught.value).splitlines()) == 3
    assert said in str(caught.value)
    with pytest.raises(Mismatch, match="sends sparse gradients"):
        _applied(source, [_RULE])
