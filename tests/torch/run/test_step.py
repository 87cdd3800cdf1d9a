"""The live step equals plain PyTorch to the bit, however a user drives it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard import _torch
from steelyard.errors import Mismatch
from steelyard.run.step import LiveStep
from steelyard.trades.recompute import recomputable, with_copies
from tests.support.live import ADAMW, MakeOptimizer, both, captured, live, part, twins
from tests.zoo import case
from tests.zoo.reference import (
    assert_same,
    assert_same_losses,
    assert_same_model,
    gradients,
    train,
)

MOMENTUM = partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True)

NAMES = (
    "gpt",
    "resnet_bn",
    "mlp",
    "edge_frozen_block",
    "edge_tied_three_ways",
    "edge_unused_parameter",
    "edge_noncontiguous_parameter",
    "edge_complex_parameter",
    "edge_buffer_written",
    "edge_keyword_batch",
    "edge_nested_batch",
    "edge_constants_in_batch",
)


def steps(step: LiveStep, batches: tuple[Any, ...], count: int, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [step(batches[index % len(batches)]) for index in range(count)]


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, ADAMW) for name in NAMES), ("gpt", MOMENTUM), ("resnet_bn", MOMENTUM)],
    ids=[*NAMES, "gpt with momentum", "resnet_bn with momentum"],
)
def test_six_steps_are_those_of_plain_pytorch(name: str, optimizer: MakeOptimizer) -> None:
    (model, loss, batch), plain, batches = both(name)
    step = live(model, loss, batch, optimizer=optimizer)
    expected, trained = train(plain, loss, batches, optimizer, steps=6, seed=5)
    assert_same_losses(expected, steps(step, batches, 6, seed=5))
    assert_same_model(trained, model)


def test_evaluation_after_training_sees_the_batchnorm_statistics_of_plain_pytorch() -> None:
    (model, loss, batch), plain, batches = both("resnet_bn")
    step = live(model, loss, batch, optimizer=ADAMW)
    _, trained = train(plain, loss, batches, ADAMW, steps=4, seed=5)
    steps(step, batches, 4, seed=5)
    assert int(model.get_buffer("1.num_batches_tracked")) == 4
    with torch.no_grad():
        assert torch.equal(model.eval()(batch["x"]), trained.eval()(batch["x"]))


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", ["gpt", "resnet_bn"])
def test_manual_accumulation_equals_plain_pytorch(name: str, to_none: bool) -> None:
    (model, loss, batch), plain, batches = both(name, 4)
    step = live(model, loss, batch, optimizer=ADAMW)
    other = ADAMW(plain.parameters())
    torch.manual_seed(3)
    for pair in (batches[:2], batches[2:], batches[1:3]):
        step.optimizer.zero_grad(set_to_none=to_none)
        for item in pair:
            step.backward(item, scale=0.5)
        step.optimizer.step()
    torch.manual_seed(3)
    for pair in (batches[:2], batches[2:], batches[1:3]):
        other.zero_grad(set_to_none=to_none)
        for item in pair:
            (loss(plain, item) * 0.5).backward()
        other.step()
    assert_same(gradients(plain), gradients(model))
    assert_same_model(plain, model)


@pytest.mark.parametrize("name", ["edge_autocast_bf16", "edge_bf16_model"])
def test_micro_batches_in_half_precision_are_plain_pytorchs_to_the_bit(name: str) -> None:
    """AdamW amplifies differences.

    The whole batch differs only by rounding, and is as far from float64 as its parts are.
    """
    (model, loss, batch), plain, _ = both(name)
    for module in (*model.modules(), *plain.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    exact, whole = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    step = live(model, loss, batch, optimizer=ADAMW, micro_batches=2)
    step(batch)
    size = len(batch["y"]) // 2
    halves = [{k: v[i : i + size] for k, v in batch.items()} for i in (0, size)]
    for half in halves:
        (loss(plain, half) / 2).backward()
    loss(whole, batch).backward()
    nn.functional.cross_entropy(exact(batch["x"].double()), batch["y"]).backward()
    in_parts, at_once = distance(plain, exact), distance(whole, exact)
    assert 0 < in_parts < 1.5 * at_once < 0.1
    ADAMW(plain.parameters()).step()
    assert_same_model(plain, model)


def distance(model: nn.Module, exact: nn.Module) -> float:
    """Return the norm of the difference of gradients, relative to the norm of the second."""
    ours, theirs = (
        torch.cat([g.double().flatten() for g in gradients(m).values()]) for m in (model, exact)
    )
    return float((ours - theirs).norm() / theirs.norm())


def test_a_gradient_kept_by_zero_grad_stays_the_same_tensor() -> None:
    (model, loss, batch), _, _ = both("mlp")
    step = live(model, loss, batch)
    step.backward(batch)
    before = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=False)
    step.backward(batch)
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))


def test_clipping_and_a_user_scheduler_equal_plain_pytorch() -> None:
    (model, loss, batch), plain, batches = both("gpt")
    step = live(model, loss, batch, optimizer=ADAMW)

    def run(m: nn.Module, optimizer: Any, backward: Callable[[Any], Any]) -> None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
        torch.manual_seed(9)
        for index in range(6):
            optimizer.zero_grad()
            backward(batches[index % 3])
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
            schedule.step()

    run(model, step.optimizer, step.backward)
    run(plain, ADAMW(plain.parameters()), lambda b: loss(plain, b).backward())
    assert_same_model(plain, model)


def test_a_user_gradient_scaler_equals_plain_pytorch() -> None:
    (model, loss, batch), plain, batches = both("mlp")
    step = live(model, loss, batch, optimizer=ADAMW)

    def run(optimizer: Any, backward: Callable[[Any, Any], Any]) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        torch.manual_seed(9)
        for index in range(5):
            optimizer.zero_grad()
            backward(batches[index % 3], scaler)
            scaler.step(optimizer)
            scaler.update()

    run(step.optimizer, lambda b, s: step.backward(b, scale=s.scale(torch.ones(()))))
    run(ADAMW(plain.parameters()), lambda b, s: s.scale(loss(plain, b)).backward())
    assert_same_model(plain, model)


def with_hooks(model: nn.Module) -> list[tuple[str, str, bool]]:
    """Register hooks of both kinds on every other parameter; some change the gradient."""
    log: list[tuple[str, str, bool]] = []

    def seen(kind: str, name: str, value: Tensor | None) -> None:
        log.append((kind, name, value is not None))

    for index, (name, parameter) in enumerate(model.named_parameters()):
        if index % 2:
            parameter.register_hook(lambda g, n=name: seen("hook", n, g) or g * 2)
            parameter.register_hook(lambda g, n=name: seen("second", n, g))
            parameter.register_post_accumulate_grad_hook(lambda p, n=name: seen("late", n, p.grad))
    return log


def test_hooks_of_parameters_run_as_often_and_in_the_order_of_plain_pytorch() -> None:
    (model, loss, batch), plain, batches = both("gpt")
    step = live(model, loss, batch, optimizer=ADAMW)
    # The hooks are added after planning, which is allowed.
    ours, theirs = with_hooks(model), with_hooks(plain)
    other = ADAMW(plain.parameters())
    torch.manual_seed(2)
    for item in batches:
        step.backward(item)
        step.optimizer.step()
    torch.manual_seed(2)
    for item in batches:
        loss(plain, item).backward()
        other.step()
    assert ours == theirs
    assert ours
    assert_same(gradients(plain), gradients(model))
    assert_same_model(plain, model)


def test_hooks_of_the_node_that_accumulates_run_as_in_plain_pytorch() -> None:
    """DistributedDataParallel and similar wrappers register hooks in this way."""
    (model, loss, batch), plain, _ = both("mlp")
    step = live(model, loss, batch)
    nodes = []

    def doubled(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    for of in (model, plain):
        weight = next(of.parameters())
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_hook(lambda *_, w=weight: doubled(w))
        node.register_prehook(lambda gradients: (gradients[0] + 1,))
        nodes.append(node)
    for seed in range(2):
        torch.manual_seed(seed)
        step.backward(batch)
        torch.manual_seed(seed)
        loss(plain, batch).backward()
    assert_same(gradients(plain), gradients(model))
    in_parts = live(model, loss, batch, micro_batches=2)
    with pytest.raises(Mismatch, match="has a hook"):
        in_parts.backward(batch)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_came_after_planning_in_micro_batches_is_refused(kind: str) -> None:
    """The hook would run once for each part, and never see a whole gradient."""
    (model, loss, batch), _, _ = both("mlp")
    step = live(model, loss, batch, micro_batches=2)
    name, parameter = next(iter(model.named_parameters()))
    handle = getattr(parameter, kind)(lambda *_: None)
    with pytest.raises(Mismatch, match=rf"parameter {name} has a hook, .* of 2 micro") as refused:
        step.backward(batch)
    assert len(str(refused.value).splitlines()) == 3
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    step.backward(batch)
    assert all(p.grad is not None for p in model.parameters())


def test_a_hook_that_raises_leaves_nothing_behind() -> None:
    (model, loss, batch), _, _ = both("mlp")
    step = live(model, loss, batch)

    def stop(_: Tensor) -> None:
        raise KeyError("stop")

    handle = next(iter(model.parameters())).register_hook(stop)
    with pytest.raises(KeyError, match="stop"):
        step(batch)
    handle.remove()
    assert torch.is_grad_enabled()
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad is not None
    step(batch)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_are_those_of_an_eager_loop(parts: int, reduction: Any) -> None:
    made = case("gpt")
    model, loss, batch = made.make(0)
    plain = twins(model)[1]
    batches = made.batches(3)
    step = live(model, loss, batch, optimizer=ADAMW, micro_batches=parts, reduction=reduction)
    shares = parts if reduction == "mean" else 1
    other = ADAMW(plain.parameters())
    torch.manual_seed(4)
    values = [step(item) for item in batches]
    torch.manual_seed(4)
    for item, value in zip(batches, values, strict=True):
        other.zero_grad()
        total = torch.zeros(())
        for index in range(parts):
            share = loss(plain, part(item, index, parts)) / shares
            share.backward()
            total += share.detach()
        other.step()
        assert torch.equal(value, total)
    assert_same_model(plain, model)


def test_a_loss_in_thirds_is_scaled_as_eager_scales_it() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    plain = twins(model)[1]
    batch = torch.randn(21, 5)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = m(x).square().mean()
        return out

    for parts in (3, 7):
        step = live(model, loss, batch, micro_batches=parts)
        value = step(batch)
        plain.zero_grad()
        total = torch.zeros(())
        for index in range(parts):
            share = loss(plain, part(batch, index, parts)) / parts
            share.backward()
            total += share.detach()
        assert torch.equal(value, total)
        assert_same(gradients(plain), gradients(model))


def test_without_an_optimizer_only_gradients_change() -> None:
    (model, loss, batch), plain, _ = both("mlp")
    step = live(model, loss, batch)
    torch.manual_seed(1)
    value = step(batch)
    torch.manual_seed(1)
    expected = loss(plain, batch)
    expected.backward()
    assert torch.equal(value, expected)
    assert not value.requires_grad
    assert_same_model(plain, model)
    assert_same(gradients(plain), gradients(model))
    torch.manual_seed(1)
    step(batch)
    assert_same(gradients(plain), gradients(model), "gradients of a second step")


def test_a_nan_is_returned_as_eager_returns_it() -> None:
    (model, loss, batch), _, _ = both("mlp")
    step = live(model, loss, batch, optimizer=ADAMW)
    assert step({**batch, "x": batch["x"] * float("nan")}).isnan()


def test_every_gradient_leaves_before_the_next_is_made() -> None:
    """Accumulating into existing gradients keeps at most a few of the new ones alive at a time."""
    (model, loss, batch), _, _ = both("gpt")
    step = live(model, loss, batch)
    step.backward(batch)
    alive: list[int] = []
    total = sum(p.nbytes for p in model.parameters())
    bound = step._bound[0, step._planned]
    inputs = bound.inputs(step._layout.leaves(batch), 0, torch.ones(()))
    import weakref

    seen: list[weakref.ref[Tensor]] = []

    def sink(value: Tensor) -> None:
        alive.append(sum(t.nbytes for r in seen if (t := r()) is not None))
        seen.append(weakref.ref(value))

    with torch.no_grad(), _torch.below_autograd():
        bound.run(inputs, [sink] * len(bound.sinks_for(inputs, None)))
    assert len(alive) == len(list(model.parameters()))
    assert max(alive) < total / 4


def test_another_shape_is_planned_once_or_refused() -> None:
    made = case("mlp")
    model, loss, batch = made.make(0)
    plain = twins(model)[1]
    small = {key: value[:3] for key, value in batch.items()}
    asked: list[Any] = []

    def other(given: Any) -> Any:
        asked.append(given)
        return captured(model, loss, given)

    step = live(model, loss, batch, optimizer=ADAMW, other_shape=other)
    expected, trained = train(plain, loss, [batch, small], ADAMW, steps=4, seed=1)
    assert_same_losses(expected, steps(step, (batch, small), 4, seed=1))
    assert_same_model(trained, model)
    assert len(asked) == len(step.other) == 1
    strict = live(model, loss, batch)
    with pytest.raises(Mismatch, match=r"has shape \[3"):
        strict(small)


def test_a_batch_of_another_shape_is_reported_before_its_step() -> None:
    model, loss, batch = case("mlp").make(0)
    small = {key: value[:3] for key, value in batch.items()}
    told: list[str] = []

    def refuse(words: str) -> None:
        told.append(words)
        if len(told) == 4:
            raise Mismatch("it is the last", expected="", remedy="")

    step = live(
        model, loss, batch, other_shape=lambda x: captured(model, loss, x), on_change=refuse
    )
    for given in (batch, small, small, batch, batch, small):
        step.backward(given)
    assert [words.partition(" ['y']")[0] for words in told] == [
        "at step 2 ['x'] has shape [3, 32], not [8, 32],",
        "at step 4 it has the planned shapes again",
        "at step 6 ['x'] has shape [3, 32], not [8, 32],",
    ]
    with pytest.raises(Mismatch, match="it is the last"):
        step.backward(batch)


@torch.library.custom_op("steelyard_tests::thinned", mutates_args=())
def thinned(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) > 0.5)


@thinned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)


def _thinned_backward(ctx: Any, gradient: Tensor) -> Tensor:
    (output,) = ctx.saved_tensors
    return gradient * (output != 0)


thinned.register_autograd(_thinned_backward, setup_context=_keep)


def test_an_untagged_random_operator_is_never_recomputed() -> None:
    class Thinning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = thinned(layer(x)).sin().exp().tanh()
            return x

    model, twin = twins(Thinning())
    batch = torch.randn(16, 8)
    plain, constants, reads = captured(model, loss_of_all, batch)
    program = with_copies(plain, recomputable(plain.graph))
    assert program.recomputed
    step = LiveStep(model, program, constants=constants, batch=batch, reads=reads)
    states = []
    for backward in (lambda: step.backward(batch), lambda: loss_of_all(twin, batch).backward()):
        torch.manual_seed(3)
        backward()
        states.append(torch.get_rng_state())
    assert_same(gradients(twin), gradients(model))
    assert torch.equal(*states)


def loss_of_all(model: nn.Module, batch: Tensor) -> Tensor:
    value: Tensor = model(batch).square().mean()
    return value
