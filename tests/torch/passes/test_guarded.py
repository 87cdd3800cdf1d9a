"""If compression is given up, no residual is lost, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from steelyard.capture.step import CapturedStep
from steelyard.comm.simulated_ranks import SimulatedRanks
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.plans.codec_fallbacks import codec_fallbacks
from steelyard.plans.trade import apply_rules
from steelyard.run import compression_fallback as guarding
from steelyard.run.codegen import emit
from steelyard.run.compression_fallback import CompressionFallback
from steelyard.run.step import LiveStep
from steelyard.trades import BY_NAME, TRADES
from steelyard.trades.shard_batch import ShardBatchRule
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

_STEPS = 3
_CODED = ("blocks.*.mlp.up.weight", "blocks.*.mlp.down.weight")
_KINDS = {
    "ternary": ("ternary_gradients", 0), "factors": ("low_rank_gradients", 4),
    "largest": ("top_k_gradients", 0),
}  # fmt: skip


@pytest.fixture(scope="module")
def source() -> CapturedStep:
    torch.manual_seed(0)
    model = GPT(layers=2, width=64, heads=2, vocabulary=96, length=16, dropout=0.0)
    batch = tokens(12, 16, 96)
    return CapturedStep(
        model=model, loss=next_token_loss, batch=batch, optimizer=partial(torch.optim.SGD, lr=0.1)
    )


def _rungs(kind: str, ranks: int) -> tuple[tuple[Rule, ...], ...]:
    trade, rank = _KINDS[kind]
    keys = {"rank": rank} if rank else {}
    codes = [BY_NAME[trade].rule(parameter=name, count=2, **keys) for name in _CODED]
    return codec_fallbacks([ShardBatchRule(ranks=ranks, bucket=1 << 16), *codes])


def _applied(source: CapturedStep, rules: tuple[Rule, ...]) -> Program:
    base = Program.plain(source.captured().graph)
    return apply_rules(base, rules, trades=TRADES, source=source)


def _on_each(
    source: CapturedStep,
    kind: str,
    ranks: int,
    work: Callable[[LiveStep, int], Any],
    **settings: Any,
) -> list[Any]:
    """Run each rank with a twin of the model, and programs for all codecs."""
    together, rungs = SimulatedRanks(ranks), _rungs(kind, ranks)
    programs = [_applied(source, rules) for rules in rungs]
    captured = source.captured(micro_batches=programs[0].units)

    def on(rank: int) -> Any:
        model = GPT(layers=2, width=64, heads=2, vocabulary=96, length=16, dropout=0.0)
        model.load_state_dict(source.model.state_dict())
        channels = {"data": together.channel(rank)}
        guard = CompressionFallback(len(rungs), **settings)
        step = LiveStep(
            model, programs[0], constants=captured.constants, batch=source.batch, rank=rank,
            runner=partial(emit, channels=channels), channels=channels, guard=guard,
            other_shape=lambda _: (programs[step.rung], captured.constants, captured.reads),
        )  # fmt: skip
        return work(step, rank)

    return together.run(on)


def _gradients(step: LiveStep) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in step.model.named_parameters() if p.grad is not None}


def _exact(source: CapturedStep) -> dict[str, torch.Tensor]:
    source.model.zero_grad()
    next_token_loss(source.model, source.batch).backward()
    named = source.model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def _apart(ours: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    return max(float((ours[n] - x).norm() / x.norm()) for n, x in exact.items())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", _KINDS)
def test_sent_gradients_and_residuals_sum_to_the_exact_gradients(
    source: CapturedStep, kind: str, ranks: int
) -> None:
    """The weights do not change, so that each step has the same gradients."""

    def work(step: LiveStep, _: int) -> tuple[dict[str, torch.Tensor], list[float], int]:
        held = []
        for _ in range(_STEPS):
            step.backward(source.batch)
            held.append(step.residuals.residual_ratio(step._whole_gradients()))
        before = _gradients(step)
        step.residuals.pay_all(step._whole_gradients())
        return _gradients(step), held, int(_apart(before, _gradients(step)) > 0.01)

    exact = {name: _STEPS * x for name, x in _exact(source).items()}
    for paid, held, was_held in (found := _on_each(source, kind, ranks, work)):
        assert was_held, "codes that hold nothing back show nothing"
        assert _apart(paid, exact) < 1e-4
        assert held == found[0][1], "ranks would decide otherwise"
        assert 0.01 < held[0] < 10


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_sampled_residual_ratio_estimates_the_whole(
    source: CapturedStep, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample covers all residuals, including those of sums that other ranks compute."""

    def work(step: LiveStep, _: int) -> tuple[float, float, float]:
        step.backward(source.batch)
        before = _gradients(step)
        gradients = step._whole_gradients()
        sampled = step.residuals.residual_ratio(gradients)
        monkeypatch.setattr("steelyard.run.error_feedback._SAMPLE", 1 << 30)
        whole = step.residuals.residual_ratio(gradients)
        step.residuals.pay_all(gradients)
        names = [f"blocks.{n}.mlp.{part}.weight" for n in (0, 1) for part in ("up", "down")]
        held = torch.cat([(_gradients(step)[n] - before[n]).flatten() for n in names])
        sent = torch.cat([before[n].flatten() for n in names])
        return sampled, whole, float(held.norm() / sent.norm())

    for sampled, whole, own in _on_each(source, "ternary", ranks, work):
        assert whole == pytest.approx(own, rel=1e-3)
        assert sampled == pytest.approx(own, rel=0.5)


def test_warm_up_is_exact_and_a_fallback_leaves_no_residual(
    source: CapturedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarding, "EVERY", 2)
    monkeypatch.setattr(guarding, "MOST_HELD", 0.0)

    def work(step: LiveStep, _: int) -> list[tuple[int, dict[str, torch.Tensor]]]:
        found = []
        for _ in range(7):
            step.zero_grad()
            step.backward(source.batch)
            found.append((step.rung, _gradients(step)))
        assert not step.residuals.tensors
        return found

    exact = _exact(source)
    for found in _on_each(source, "ternary", 2, work, warm_up=1):
        # int8 and bfloat16 have no residual, so no residual is given up for them.
        assert [rung for rung, _ in found] == [3, 0, 0, 1, 1, 1, 1]
        apart = [_apart(gradients, exact) for _, gradients in found]
        assert apart[0] < 1e-5
        assert apart[1] > 0.1
        both = {name: found[1][1][name] + found[2][1][name] for name in exact}
        assert _apart(both, {name: 2 * x for name, x in exact.items()}) < 1e-4
        assert max(apart[3:]) < 0.02


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_residuals_of_another_plan_are_added_in_the_first_step(
    source: CapturedStep, ranks: int
) -> None:
    """They were saved by two ranks with compressed gradients, and resumed by ranks without
    compression."""

    def lose(step: LiveStep, _: int) -> dict[str, torch.Tensor]:
        step.backward(source.batch)
        return {**step.residual_state(), **_gradients(step)}

    exact = _exact(source)
    saved = _on_each(source, "ternary", 2, lose)[0]
    sent = {name: saved.pop(name) for name in exact}
    program = _applied(source, _rungs("ternary", ranks)[-1] if ranks > 1 else ())
    together = SimulatedRanks(ranks)

    def resume(rank: int) -> dict[str, torch.Tensor]:
        channels = {"data": together.channel(rank)} if ranks > 1 else {}
        captured = source.captured(micro_batches=program.units)
        model = GPT(layers=2, width=64, heads=2, vocabulary=96, length=16, dropout=0.0)
        model.load_state_dict(source.model.state_dict())
        step = LiveStep(
            model, program, constants=captured.constants, batch=source.batch, rank=rank,
            runner=partial(emit, channels=channels), channels=channels,
        )  # fmt: skip
        assert step.restore_residuals(saved) == []
        step.backward(source.batch)
        first = _gradients(step)
        step.zero_grad()
        step.backward(source.batch)
        assert _apart(_gradients(step), exact) < 1e-5
        return first

    for first in together.run(resume):
        both = {name: first[name] + sent[name] for name in exact}
        assert _apart(both, {name: 2 * x for name, x in exact.items()}) < 1e-4


@pytest.mark.parametrize("others", [2, 3])
def test_residuals_of_a_stopped_run_are_in_its_checkpoint(
    source: CapturedStep, others: int
) -> None:
    """The run stops after the step that ended a codec, and before the step that would have
    applied its residuals."""

    def lose(step: LiveStep, _: int) -> dict[str, torch.Tensor]:
        step.backward(source.batch)
        step.switch_programs(None)
        return {**step.residual_state(), **_gradients(step)}

    def resume(step: LiveStep, _: int) -> dict[str, torch.Tensor]:
        assert step.restore_residuals(saved) == []
        step.backward(source.batch)
        step.residuals.pay_all(step._whole_gradients())
        return _gradients(step)

    exact = _exact(source)
    saved = _on_each(source, "ternary", 2, lose)[0]
    sent = {name: saved.pop(name) for name in exact}
    assert _apart(sent, exact) > 0.1
    for then in _on_each(source, "ternary", others, resume):
        both = {name: then[name] + sent[name] for name in exact}
        assert _apart(both, {name: 2 * x for name, x in exact.items()}) < 1e-4
