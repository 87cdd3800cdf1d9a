"""Graphs with compressed gradients: the new exchanges, the unchanged ones, and their waits."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from steelyard.capture.step import CapturedStep
from steelyard.comm.simulated_ranks import SimulatedRanks
from steelyard.errors import Mismatch
from steelyard.ir.collective import Exchange
from steelyard.ir.gradient_codec import (
    BLOCK,
    ENCODE,
    INT8,
    LARGEST,
    RESIDUAL,
    TERNARY,
    Codec,
    blocks_of,
)
from steelyard.ir.graph import OutputKind
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.operators import gradient_codecs as codes
from steelyard.operators.gradient_codecs import (
    add_decoded,
    decode_gradients,
    decode_sum,
    encode_gradients,
    encode_sum,
)
from steelyard.plans.trade import apply_rules
from steelyard.run.codegen import emit
from steelyard.run.error_feedback import ErrorFeedback
from steelyard.run.step import LiveStep
from steelyard.trades import BY_NAME, TRADES
from steelyard.trades.gradient_compression import QuantizedGradientsRule, TernaryGradientsRule
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.shard_batch import ShardBatchRule
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

_BATCH = 12


@pytest.fixture(scope="module")
def source() -> CapturedStep:
    torch.manual_seed(0)
    model = GPT(layers=2, width=64, heads=2, vocabulary=96, length=16, dropout=0.0)
    batch = tokens(_BATCH, 16, 96)
    return CapturedStep(
        model=model, loss=next_token_loss, batch=batch, optimizer=partial(torch.optim.SGD, lr=0.1)
    )


def _rules(
    ranks: int, trade: str = "ternary_gradients", *, bucket: int = 1 << 16, lag: int = 2
) -> list[Rule]:
    coded = ("blocks.*.mlp.up.weight", "blocks.*.mlp.down.weight")
    return [
        ShardBatchRule(ranks=ranks, bucket=bucket),
        OverlapRule(window=lag),
        *(BY_NAME[trade].rule(parameter=name, count=2) for name in coded),
    ]


def _applied(source: CapturedStep, rules: list[Rule]) -> Program:
    return apply_rules(Program.plain(source.captured().graph), rules, trades=TRADES, source=source)


@pytest.mark.parametrize("codec", [TERNARY, INT8, LARGEST], ids=lambda codec: codec.name)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("numel", [5, BLOCK, 7 * BLOCK + 3, 1500 * BLOCK + 1])
def test_decoded_value_plus_residual_is_the_input(codec: Codec, parts: int, numel: int) -> None:
    x = torch.randn(numel)
    blocks = blocks_of(numel, parts=parts)
    lost = torch.zeros(blocks * BLOCK) if codec.has_residual else None
    coded = encode_gradients([x[: numel // 2], x[numel // 2 :]], lost, codec.name, parts)
    assert coded.shape == (parts, codec.row_bytes(blocks // parts))
    back = decode_gradients(coded, codec.name)
    whole = torch.cat([x, torch.zeros(blocks * BLOCK - numel)])
    if lost is None:
        for stretch, read in zip(_stretches(whole, parts), _stretches(back, parts), strict=True):
            most = stretch.abs().amax((0, 2), keepdim=True) / 254
            assert (read - stretch).abs().le(most * 1.01).all()
    else:
        assert torch.allclose(back + lost, whole, atol=1e-6)
        assert lost.norm() < whole.norm()
    again = encode_sum(coded, None, codec.name) if parts == 1 else None
    if again is not None:
        assert torch.allclose(decode_sum(again, codec.name), decode_sum(coded, codec.name), atol=1)


@pytest.mark.parametrize("codec", [TERNARY, INT8, LARGEST], ids=lambda codec: codec.name)
def test_codecs_do_not_depend_on_the_default_dtype(codec: Codec) -> None:
    x = torch.randn(3 * BLOCK)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    codes._encoder.cache_clear()
    codes._decoder.cache_clear()
    try:
        lost = torch.zeros(3 * BLOCK, dtype=torch.float32) if codec.has_residual else None
        coded = encode_gradients([x], lost, codec.name, 1)
        back = decode_sum(coded, codec.name)
    finally:
        torch.set_default_dtype(before)
    assert back.dtype == torch.float32
    assert (back + lost if lost is not None else back).allclose(x, atol=0.02)


def test_empty_tensors_are_encoded_as_nothing() -> None:
    assert encode_gradients([torch.empty(0, 4)], None, TERNARY.name, 1).shape == (1, 0)


@pytest.mark.parametrize("codec", [TERNARY, INT8], ids=lambda codec: codec.name)
@pytest.mark.parametrize("rows", [2, 5, 9])
def test_rows_are_summed_in_rank_order(codec: Codec, rows: int) -> None:
    """Few rows are unrolled, many are a loop: all ranks get the same bits.

    Five rows equal the number of blocks with which the loop was traced.
    """
    each = [encode_gradients([torch.randn(3 * BLOCK)], None, codec.name, 1) for _ in range(rows)]
    total = torch.zeros(3 * BLOCK)
    for one in each:
        total += decode_sum(one, codec.name)
    assert torch.equal(decode_sum(torch.cat(each), codec.name), total)
    added = torch.ones(3 * BLOCK)
    add_decoded(torch.cat(each), added, codec.name)
    assert torch.equal(added, 1 + total)


def _stretches(values: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Return the chunks that are encoded together: quarters, of each of which a block has some
    elements."""
    every = (x for part in values.chunk(parts) for x in part.split(512 * BLOCK))
    return [x.view(4, -1, BLOCK // 4) for x in every]


@pytest.mark.parametrize(
    "numel", [BLOCK, pytest.param(600 * BLOCK + 7, marks=pytest.mark.slow)], ids=str
)
def test_top_k_sends_the_largest_of_each_quarter_and_keeps_the_rest(numel: int) -> None:
    x = torch.randn(numel)
    blocks = blocks_of(numel, parts=1)
    lost = torch.zeros(blocks * BLOCK)
    back = decode_sum(encode_gradients([x], lost, LARGEST.name, 1), LARGEST.name)
    whole = torch.cat([x, torch.zeros(blocks * BLOCK - numel)])
    for values, read in zip(_stretches(whole, 1), _stretches(back, 1), strict=True):
        sizes = values.abs()
        least = sizes.topk(LARGEST.num_largest, dim=2).values[..., -1:]
        assert ((read != 0) <= (sizes >= least)).all()
        scale = sizes.amax((0, 2), keepdim=True) / 127
        # If several elements equal the smallest one that is sent, not all of them are sent.
        assert ((read - values).abs() <= scale * 0.51)[sizes > least].all()
        assert ((read - values).abs() <= scale * 0.51)[read != 0].all()
    # A residual is sent when it has grown, so every element is sent at last.
    for _ in range(BLOCK):
        encode_gradients([torch.zeros(numel)], lost, LARGEST.name, 1)
    assert lost.norm() < 0.01 * whole.norm()


def test_zeros_are_sent_as_zeros() -> None:
    lost = torch.zeros(BLOCK)
    coded = encode_gradients([torch.zeros(BLOCK)], lost, LARGEST.name, 1)
    assert not decode_sum(coded, LARGEST.name).any()
    assert not lost.any()


@pytest.mark.parametrize("codec", ["ternary", "largest"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_values_reach_all_ranks_and_leave_no_residual(bad: float, codec: str) -> None:
    x = torch.randn(2 * BLOCK)
    x[3] = bad
    lost = torch.ones(2 * BLOCK)
    coded = encode_gradients([x], lost, codec, 1)
    back = decode_sum(coded, codec)
    assert not back[3].isfinite()
    assert lost.isfinite().all()
    assert back.isfinite().sum() == BLOCK  # only the other block is finite


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_compressed_collectives_replace_the_all_reduces_of_the_named_parameters_only(
    source: CapturedStep, ranks: int
) -> None:
    plain = _applied(source, _rules(ranks)[:2])
    program = _applied(source, _rules(ranks))
    graph = program.graph
    assert not graph.problems()
    assert not program.problems()
    kinds = [graph.by_name[name].collective.kind for name in graph.collectives]
    coded = sum(node.op == ENCODE for node in graph.nodes)
    assert coded >= 1
    expected = {Exchange.ALL_REDUCE, Exchange.ALL_GATHER}
    assert set(kinds) == (expected if ranks == 2 else expected | {Exchange.ALL_TO_ALL})
    assert kinds.count(Exchange.ALL_GATHER) == coded
    # The step still returns every gradient, with the same strides.
    for before, after in zip(plain.graph.outputs, graph.outputs, strict=True):
        assert (before.kind, before.target) == (after.kind, after.target)
        one, other = plain.graph.by_name[before.node], graph.by_name[after.node]
        if after.kind is OutputKind.GRADIENT:
            assert one.outputs[0].shape == other.outputs[0].shape
            assert one.outputs[0].stride == other.outputs[0].stride
    sizes = [n.outputs[0].nbytes for n in graph.inputs() if n.name.startswith(RESIDUAL)]
    assert len(sizes) == (coded if ranks == 2 else 2 * coded)
    assert program.sent_bytes < plain.sent_bytes
    assert program.sends_codes
    assert program.is_lossy


@pytest.mark.parametrize("ranks", [2, 3])
def test_bfloat16_gradients_are_all_reduced_and_waited_for_as_late(
    source: CapturedStep, ranks: int
) -> None:
    rules = [
        QuantizedGradientsRule(parameter=rule.parameter, count=rule.count, format="bfloat16")
        if isinstance(rule, TernaryGradientsRule)
        else rule
        for rule in _rules(ranks, bucket=1 << 14)
    ]
    plain, program = _applied(source, rules[:2]), _applied(source, rules)
    graph = program.graph
    kinds = {graph.by_name[name].collective.kind for name in graph.collectives}
    assert kinds == {Exchange.ALL_REDUCE}
    assert not any(node.name.startswith(RESIDUAL) for node in graph.inputs())
    coded = [node for node in graph.nodes if node.op == ENCODE]
    assert coded
    assert all(node.outputs[0].dtype == "bfloat16" for node in coded)
    # Ranks send twice (n - 1) of n parts of what they sum.
    saved = sum(node.outputs[0].nbytes for node in coded) * 2 * (ranks - 1) / ranks
    assert plain.sent_bytes - program.sent_bytes == pytest.approx(saved, rel=1e-3)
    sent = {f"{node.name}_sent" for node in coded}
    late = [
        e for e in program.exchanges
        if graph.by_name[program.instructions[e.issue].node].name in sent and e.wait != e.issue + 1
    ]  # fmt: skip
    assert len(late) >= len(coded) - 1  # nothing is computed after the last


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("lag", [1, 2, 4])
def test_compressed_sums_are_waited_for_as_late_as_others(
    source: CapturedStep, ranks: int, lag: int
) -> None:
    """Both exchanges of a compressed sum wait until the ``lag``-th exchange after them is
    issued, or until the end."""
    later = issued_meanwhile(_applied(source, _rules(ranks, bucket=1 << 14, lag=lag)))
    assert len(later) >= 3
    assert max(later) <= 2 * lag  # an exchange that is issued after a wait is one more
    at_once = _applied(source, [r for r in _rules(ranks, bucket=1 << 14) if r.trade != "overlap"])
    assert all(e.wait == e.issue + 1 for e in at_once.exchanges if e.wait is not None)
    assert sum(later) >= len(later) // 2


def issued_meanwhile(program: Program) -> list[int]:
    """Return, for each exchange of codes, how many others are issued before its wait."""
    exchanges, nodes = program.exchanges, program.graph.by_name
    names = [nodes[program.instructions[e.issue].node].name for e in exchanges]
    found = []
    for own, name in zip(exchanges, names, strict=True):
        if name.endswith(("coded_sent", "added_sent")):
            assert own.wait is not None
            found.append(sum(own.issue < e.issue < own.wait for e in exchanges))
    return found


def test_parameters_that_cannot_be_compressed_are_refused(source: CapturedStep) -> None:
    for module in ("blocks.*.mlp.up.bias", "nothing.*.weight"):
        rules = [*_rules(2)[:2], TernaryGradientsRule(parameter=module, count=2)]
        with pytest.raises(Mismatch) as caught:
            _applied(source, rules)
        assert len(str(caught.value).splitlines()) == 3
    again = "blocks.*.mlp.up.weight"
    twice = [*_rules(2), QuantizedGradientsRule(format="int8", parameter=again, count=2)]
    with pytest.raises(Mismatch, match="two rules compress"):
        _applied(source, twice)
    alone = [rule for rule in _rules(2) if rule.trade == "ternary_gradients"]
    with pytest.raises(Mismatch, match="share only the batch"):
        _applied(source, alone)


def _step(source: CapturedStep, program: Program, together: SimulatedRanks, rank: int) -> LiveStep:
    channels = {"data": together.channel(rank)}
    captured = source.captured(micro_batches=program.units)
    return LiveStep(
        source.model, program, constants=captured.constants, batch=source.batch,
        runner=partial(emit, channels=channels), rank=rank, channels=channels,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("others", [2, 3])
def test_residuals_survive_a_checkpoint(source: CapturedStep, ranks: int, others: int) -> None:
    """The same number of ranks gets the same bits; another number gets shares of the same sum,
    also in other buckets."""
    program = _applied(source, _rules(ranks))
    together = SimulatedRanks(ranks)

    def train(rank: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        step = _step(source, program, together, rank)
        for _ in range(2):
            step.zero_grad()
            step.backward(source.batch)
        step.zero_grad()
        saved = step.residuals.gather()
        return saved, [x.clone() for x in step.residuals.tensors]

    found = together.run(train)
    saved, _ = found[0]
    assert saved
    bucket = 1 << 16 if others == ranks else 1 << 18
    again, after = _applied(source, _rules(others, bucket=bucket)), SimulatedRanks(others)

    def resume(rank: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        step = _step(source, again, after, rank)
        assert step.residuals.restore(saved) == []
        return step.residuals.gather(), [x.clone() for x in step.residuals.tensors]

    resumed = after.run(resume)
    if others == ranks:
        for (_, before), (_, now) in zip(found, resumed, strict=True):
            assert all(map(torch.equal, before, now))
    for name, total in _totals(saved).items():
        assert torch.allclose(_totals(resumed[0][0])[name], total, atol=1e-6), name


def _totals(saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the total residual of each parameter."""
    found: dict[str, torch.Tensor] = {}
    for key, value in saved.items():
        kind, _, name = key.partition("/")
        lost = value.sum(0) if kind == "of ranks" else value
        found[name] = found.get(name, torch.zeros_like(lost)) + lost
    return found


def test_residuals_that_another_plan_does_not_use_are_reported(source: CapturedStep) -> None:
    channels = {"data": SimulatedRanks(2).channel(0)}
    residuals = ErrorFeedback(channels)
    assert residuals.restore({"of ranks/parameter:a": torch.ones(2, 3)}) == ["parameter:a"]
