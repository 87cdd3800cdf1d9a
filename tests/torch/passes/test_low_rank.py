"""Low-rank factors of matrices: their results as graphs, and over steps of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from steelyard.capture.step import CapturedStep
from steelyard.comm.simulated_ranks import SimulatedRanks
from steelyard.errors import Mismatch
from steelyard.ir.collective import Exchange
from steelyard.ir.gradient_codec import LEFT, RESIDUAL, RIGHT, START, low_rank, matrix_of
from steelyard.ir.graph import Tensor
from steelyard.ir.rule import Rule
from steelyard.operators.low_rank import (
    first_start,
    left_factors,
    matrices_of_factors,
    right_factors,
)
from steelyard.trades.gradient_compression import LowRankGradientsRule, TernaryGradientsRule
from tests.torch.passes.compression.test_compressed_all_reduce import (
    _applied,
    _rules,
    _step,
    issued_meanwhile,
    source,
)

__all__ = ["source"]

SHAPES, RANK = [(24, 40), (96, 17)], 2


def _rule(module: str, rank: int, count: int = 1) -> Rule:
    return LowRankGradientsRule(parameter=module, rank=rank, count=count)


def _ruled(ranks: int, *, rank: int = RANK, bucket: int = 1 << 16, lag: int = 2) -> list[Rule]:
    return [
        LowRankGradientsRule(parameter=rule.parameter, count=rule.count, rank=rank)
        if isinstance(rule, TernaryGradientsRule)
        else rule
        for rule in _rules(ranks, bucket=bucket, lag=lag)
    ]


class Ranks:
    """Ranks with their own residuals, and common starting factors."""

    def __init__(self, count: int) -> None:
        self.lost = [torch.zeros(sum(n * m for n, m in SHAPES)) for _ in range(count)]
        self.starts = [first_start(RANK * sum(m for _, m in SHAPES)) for _ in range(count)]

    def step(self, given: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the sum that every rank computes."""
        lefts = sum(
            left_factors(own, lost, start, SHAPES, RANK)
            for own, lost, start in zip(given, self.lost, self.starts, strict=True)
        )
        assert isinstance(lefts, torch.Tensor)
        own = [lefts.clone() for _ in self.lost]
        parts = zip(own, self.lost, strict=True)
        rights = sum(right_factors(left, lost, SHAPES, RANK) for left, lost in parts)
        assert isinstance(rights, torch.Tensor)
        parts = zip(own, self.starts, strict=True)
        return [matrices_of_factors(left, rights, start, SHAPES, RANK) for left, start in parts]


def _drawn(rank: int) -> list[torch.Tensor]:
    return [torch.randn(n, rank) @ torch.randn(rank, m) for n, m in SHAPES]


def test_low_rank_sums_and_residuals_give_the_exact_sum() -> None:
    """The sum of the received sums and all residuals equals the sum of all inputs."""
    torch.manual_seed(0)
    ranks, given, told = Ranks(3), torch.zeros(0), torch.zeros(0)
    for _ in range(5):
        own = [[torch.randn(n, m) for n, m in SHAPES] for _ in range(3)]
        made = ranks.step(own)
        assert all(torch.equal(made[0], other) for other in made)
        assert all(torch.equal(ranks.starts[0], other) for other in ranks.starts)
        flat = sum(torch.cat([x.flatten() for x in each]) for each in own)
        given, told = (flat + given, made[0] + told) if given.numel() else (flat, made[0])
        assert torch.allclose(told + sum(ranks.lost), given, atol=1e-4)


def test_a_matrix_of_the_rank_is_sent_exactly() -> None:
    torch.manual_seed(0)
    ranks, own = Ranks(1), _drawn(RANK)
    for _ in range(3):
        ranks.lost[0].zero_()
        (made,) = ranks.step([own])
    assert torch.allclose(made, torch.cat([x.flatten() for x in own]), rtol=1e-4, atol=1e-4)
    assert ranks.lost[0].norm() < 1e-4 * made.norm()


def test_the_best_low_rank_approximation_is_found_in_a_few_steps() -> None:
    torch.manual_seed(0)
    ranks, own = Ranks(1), [x + 0.01 * torch.randn_like(x) for x in _drawn(5)]
    for _ in range(40):
        ranks.lost[0].zero_()
        ranks.step([own])
    for x, lost in zip(own, ranks.lost[0].split([n * m for n, m in SHAPES]), strict=True):
        assert lost.norm() < 1.001 * torch.linalg.svdvals(x)[RANK:].norm()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_values_reach_all_ranks_and_leave_no_residual(bad: float) -> None:
    torch.manual_seed(0)
    ranks = Ranks(2)
    own = [[torch.randn(n, m) for n, m in SHAPES] for _ in range(2)]
    ranks.step(own)
    started = ranks.starts[0].clone()
    own[1][0][3, 5] = bad
    for made in ranks.step(own):
        first, second = made.split([n * m for n, m in SHAPES])
        assert not first.isfinite().any()
        assert second.isfinite().all()
    assert all(lost.isfinite().all() for lost in ranks.lost)
    of_first = RANK * SHAPES[0][1]
    assert torch.equal(ranks.starts[0][:of_first], started[:of_first])
    own[1][0][3, 5] = 0.0
    assert all(made.isfinite().all() for made in ranks.step(own))


def test_zero_matrices_are_sent_as_zeros() -> None:
    ranks = Ranks(2)
    started = ranks.starts[0].clone()
    for made in ranks.step([[torch.zeros(n, m) for n, m in SHAPES]] * 2):
        assert not made.any()
    assert torch.equal(ranks.starts[0], started)


@pytest.mark.parametrize(
    ("shape", "stride", "rows"),
    [((6, 4), (4, 1), 6), ((6, 4), (1, 6), 4), ((8, 3, 2, 2), (12, 1, 6, 3), 8), ((5,), (1,), 5)],
)
def test_matrix_rows_are_the_dim_with_the_largest_stride(
    shape: tuple[int, ...], stride: tuple[int, ...], rows: int
) -> None:
    tensor = Tensor(shape=shape, stride=stride, dtype="float32", storage=0)
    assert matrix_of(tensor) == (rows, tensor.numel // rows)


@pytest.mark.parametrize("ranks", [2, 3])
def test_low_rank_collectives_replace_the_all_reduces_of_the_named_parameters_only(
    source: CapturedStep, ranks: int
) -> None:
    plain, program = _applied(source, _ruled(ranks)[:2]), _applied(source, _ruled(ranks))
    graph = program.graph
    assert not graph.problems()
    assert not program.problems()
    kinds = {graph.by_name[name].collective.kind for name in graph.collectives}
    assert kinds == {Exchange.ALL_REDUCE}
    lefts = [node for node in graph.nodes if node.op == LEFT]
    rights = [node for node in graph.nodes if node.op == RIGHT]
    assert len(lefts) == len(rights) >= 1
    states = [n for n in graph.inputs() if n.name.startswith(RESIDUAL)]
    assert len(states) == 2 * len(lefts)
    named = [graph.by_name[f"parameter:blocks.{b}.mlp.{w}.weight"].outputs[0]
             for b in (0, 1) for w in ("up", "down")]  # fmt: skip
    factors = sum(4 * RANK * sum(matrix_of(tensor)) for tensor in named)
    assert sum(n.outputs[0].nbytes for n in (*lefts, *rights)) == factors
    whole = sum(tensor.nbytes for tensor in named)
    lost = sum(n.outputs[0].nbytes for n in states if not n.name.endswith(START))
    assert lost == whole
    saved = (whole - factors) * 2 * (ranks - 1) / ranks
    assert plain.sent_bytes - program.sent_bytes == pytest.approx(saved, rel=1e-3)
    assert program.sends_codes
    assert program.is_lossy


@pytest.mark.parametrize("lag", [1, 4])
def test_both_factors_are_waited_for_as_late_as_others(source: CapturedStep, lag: int) -> None:
    later = issued_meanwhile(_applied(source, _ruled(2, bucket=1 << 14, lag=lag)))
    assert len(later) >= 4
    assert sum(later) >= len(later) // 2


def test_matrices_without_smaller_factors_are_refused(source: CapturedStep) -> None:
    for rules in (
        [_rule("blocks.*.mlp.up.weight", 16, 2)],
        [_rule("blocks.*.mlp.up.bias", 1, 2)],
    ):
        with pytest.raises(Mismatch, match="much larger than factors of rank") as caught:
            _applied(source, [*_ruled(2)[:2], *rules])
        assert len(str(caught.value).splitlines()) == 3
    assert low_rank(3) == low_rank(3) != low_rank(4)


@pytest.mark.parametrize("others", [2, 3])
def test_a_checkpoint_holds_residuals_and_start_vectors(source: CapturedStep, others: int) -> None:
    """The same number of ranks gets the same bits; another number gets shares of the same sum,
    and the same starting factors."""
    together = SimulatedRanks(2)
    program = _applied(source, _ruled(2))

    def train(rank: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        step = _step(source, program, together, rank)
        for _ in range(2):
            step.zero_grad()
            step.backward(source.batch)
        step.zero_grad()
        return step.residuals.gather(), [x.clone() for x in step.residuals.tensors]

    (saved, before), _ = together.run(train)
    starts = {name: x for name, x in saved.items() if name.startswith("starts/")}
    assert len(starts) == 4
    again = _applied(source, _ruled(others, bucket=1 << 16 if others == 2 else 1 << 18))
    after = SimulatedRanks(others)

    def resume(rank: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        step = _step(source, again, after, rank)
        assert step.residuals.restore(saved) == []
        return step.residuals.gather(), [x.clone() for x in step.residuals.tensors]

    resumed, now = after.run(resume)[0]
    if others == 2:
        assert all(map(torch.equal, before, now))
    for name, value in saved.items():
        kept = resumed[name]
        if name in starts:
            assert torch.equal(value, kept), name
        else:
            assert torch.allclose(value.sum(0), kept.sum(0), atol=1e-6), name
