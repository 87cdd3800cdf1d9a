"""The live step against plain PyTorch, to the bit, in every way a user may drive it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from steelyard import _torch
from steelyard.core.errors import BadInput, Mismatch
from steelyard.run.step import LiveStep
from tests.run.live import MakeOptimizer, captured, live, part, twins
from tests.zoo import Sample, case
from tests.zoo.reference import (
    assert_same,
    assert_same_losses,
    assert_same_model,
    buffers,
    gradients,
    train,
)

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
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


def both(name: str, batches: int = 3) -> tuple[Sample, nn.Module, tuple[Any, ...]]:
    made = case(name)
    sample = made.make(0)
    return sample, twins(sample[0])[1], made.batches(batches)


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
def test_accumulating_by_hand(name: str, to_none: bool) -> None:
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


def test_a_gradient_kept_by_zero_grad_stays_the_same_tensor() -> None:
    (model, loss, batch), _, _ = both("mlp")
    step = live(model, loss, batch)
    step.backward(batch)
    before = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=False)
    step.backward(batch)
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))


def test_clipping_and_a_scheduler_of_the_users_own() -> None:
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


def test_a_gradient_scaler_of_the_users_own() -> None:
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
    """Hooks of both kinds on every other parameter; some change the gradient."""
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
    # After planning: hooks may come and go.
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
    """As DistributedDataParallel and its like register them."""
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
    """It would run once for each part, and see no whole gradient."""
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


def test_the_loss_is_plain_and_without_an_optimizer_only_gradients_change() -> None:
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
    bound = step._bound[step._planned]
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


# --- what is refused before anything runs ---------------------------------------------------------


class Watched(nn.Module):
    """Something of each kind that a captured step fixes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(4)
        self.scale = 2.0
        self.constant = torch.ones(4)
        self.listed = [torch.ones(4)]
        self.act = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.scale + self.constant + self.listed[0]
        result: Tensor = self.act(self.norm(y))
        return result


def square(model: nn.Module, batch: Any) -> Tensor:
    value: Tensor = model(batch["x"]).square().mean()
    return value


def replace_parameter(m: Watched) -> None:
    m.inner[0].weight = nn.Parameter(torch.ones(4, 4))


def tie(m: Watched) -> None:
    m.inner[0].weight = m.inner[0].weight.detach().clone().requires_grad_()  # type: ignore[assignment]


def hook(m: Watched) -> None:
    m.inner.register_forward_hook(lambda *_: None)


CHANGES: dict[str, tuple[Callable[[Watched], object], str]] = {
    "parameter replaced": (replace_parameter, r"parameter inner\.0\.weight was replaced"),
    "parameter gone": (lambda m: delattr(m.inner[0], "bias"), r"parameter inner\.0\.bias is gone"),
    "parameter set to None": (lambda m: setattr(m.inner[0], "bias", None), "was replaced"),
    "parameter new": (
        lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1))),
        "parameter more appeared",
    ),
    "loaded by assignment": (
        lambda m: m.load_state_dict(m.state_dict(), assign=True),
        "was replaced",
    ),
    "buffer replaced": (
        lambda m: setattr(m.norm, "running_mean", torch.zeros(4)),
        r"buffer norm\.running_mean was replaced",
    ),
    "buffer new": (lambda m: m.register_buffer("b", torch.ones(1)), "buffer b appeared"),
    "module replaced": (
        lambda m: setattr(m, "norm", nn.BatchNorm1d(4)),
        "module norm was replaced",
    ),
    "module added": (lambda m: m.inner.append(nn.ReLU()), r"module inner\.2 appeared"),
    "frozen": (lambda m: m.inner[0].weight.requires_grad_(False), "requires_grad of parameter"),
    "eval": (lambda m: m.eval(), r"the model is in eval\(\) mode"),
    "one in eval": (lambda m: m.norm.eval(), r"norm is in eval\(\) mode"),
    "number": (lambda m: setattr(m, "scale", 3.0), r"model\.scale, which .* is no longer 2\.0"),
    "dropout rate": (lambda m: setattr(m.inner[1], "p", 0.1), r"model\.inner\.1\.p, which"),
    "function": (lambda m: setattr(m, "act", torch.tanh), r"model\.act.* was replaced"),
    "forward overridden": (lambda m: setattr(m, "forward", square), "forward was overridden"),
    "constant replaced": (
        lambda m: setattr(m, "constant", torch.ones(4)),
        r"tensor model\.constant, which the step reads, is another",
    ),
    "listed constant": (
        lambda m: m.listed.__setitem__(0, torch.ones(4)),
        r"tensor model\.listed\[0\], which the step reads, is another",
    ),
    "forward hook": (hook, "a forward hook of inner appeared"),
    "cast": (lambda m: m.double(), "was replaced"),
    "dtype of data": (
        lambda m: setattr(m.norm.bias, "data", torch.zeros(4).double()),
        r"parameter norm\.bias is now float64\[4\]",
    ),
    "shape of data": (
        lambda m: setattr(m.norm.bias, "data", torch.zeros(5)),
        r"parameter norm\.bias is now float32\[5\]",
    ),
}


def test_a_hook_of_every_module_is_refused_when_it_comes_after_planning() -> None:
    model, batch = Watched(), {"x": torch.randn(6, 4)}
    step = live(model, square, batch)
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(Mismatch, match="a forward hook of every module appeared"):
            step(batch)
    finally:
        handle.remove()
    step(batch)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_refused_before_anything_runs(change: str) -> None:
    torch.manual_seed(0)
    model = Watched()
    batch = {"x": torch.randn(6, 4)}
    step = live(model, square, batch, optimizer=ADAMW)
    step(batch)
    act, message = CHANGES[change]
    act(model)
    before = {**buffers(model), **gradients(model)}
    state = torch.get_rng_state()
    with pytest.raises(Mismatch, match=message) as refused:
        step(batch)
    assert len(str(refused.value).splitlines()) == 3
    assert_same(before, {**buffers(model), **gradients(model)})
    assert torch.equal(state, torch.get_rng_state())


def load(m: Watched) -> None:
    m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()})


def swap_data(m: Watched) -> None:
    m.inner[0].weight.data = torch.full((4, 4), 0.5)


def fill(m: Watched) -> None:
    with torch.no_grad():
        m.inner[0].weight.copy_(torch.ones(4, 4))
        m.constant.fill_(4)


ALLOWED: dict[str, Callable[[Watched], object]] = {
    "load_state_dict": load,
    "data swapped": swap_data,
    "filled": fill,
    "same number again": lambda m: setattr(m, "scale", float("2.0")),
    "an attribute that nothing read": lambda m: setattr(m, "best", 0.3),
    "eval and back": lambda m: (m.eval(), m.train()),
    "forward hook and back": lambda m: m.register_forward_hook(lambda *_: None).remove(),
}


@pytest.mark.parametrize("change", ALLOWED)
def test_new_values_are_no_other_model(change: str) -> None:
    torch.manual_seed(0)
    model = Watched()
    plain = twins(model)[1]
    batch = {"x": torch.randn(6, 4)}
    step = live(model, square, batch, optimizer=ADAMW)
    other = ADAMW(plain.parameters())
    for _ in range(2):
        ALLOWED[change](model)
        ALLOWED[change](plain)
        torch.manual_seed(1)
        value = step(batch)
        torch.manual_seed(1)
        other.zero_grad()
        expected = square(plain, batch)
        expected.backward()
        other.step()
        assert torch.equal(value, expected)
    assert_same_model(plain, model)


def batch_of(**changed: Any) -> dict[str, Any]:
    return {"x": torch.randn(6, 4), "y": [torch.ones(6)], "flag": True, "rate": 0.5, **changed}


BATCHES: dict[str, tuple[Any, str]] = {
    "shape": (batch_of(x=torch.randn(5, 4)), r"\['x'\] has shape \[5, 4\]"),
    "dtype": (batch_of(x=torch.randn(6, 4).double()), "float64"),
    "device": (batch_of(x=torch.randn(6, 4, device="meta")), "meta"),
    "strides": (batch_of(x=torch.randn(4, 6).t()), "strides"),
    "gradient": (batch_of(x=torch.randn(6, 4, requires_grad=True)), "requires a gradient"),
    "no tensor": (batch_of(x=3), "is 3"),
    "flag": (batch_of(flag=False), "is False"),
    "flag of another type": (batch_of(flag=1), "is 1"),
    "number": (batch_of(rate=0.25), r"is 0\.25"),
    "key": ({**batch_of(), "z": 1}, "another structure"),
    "list": (batch_of(y=(torch.ones(6),)), "another structure"),
    "length": (batch_of(y=[torch.ones(6), torch.ones(6)]), "another structure"),
}


def weighed(model: nn.Module, batch: Any) -> Tensor:
    rate = batch["rate"] if batch["flag"] else 1.0
    value: Tensor = (model(batch["x"]).sum(1) * batch["y"][0] * rate).mean()
    return value


@pytest.mark.parametrize("change", BATCHES)
def test_another_batch_is_refused_before_anything_runs(change: str) -> None:
    torch.manual_seed(0)
    step = live(nn.Linear(4, 4), weighed, batch_of(), optimizer=ADAMW)
    step(batch_of())
    batch, message = BATCHES[change]
    before = gradients(step.model)
    with pytest.raises(Mismatch, match=message) as refused:
        step(batch)
    assert len(str(refused.value).splitlines()) == 3
    assert_same(before, gradients(step.model))


def test_the_keys_of_a_batch_may_come_in_another_order() -> None:
    step = live(nn.Linear(4, 4), weighed, batch_of())
    batch = batch_of()
    value = step(batch)
    assert torch.equal(value, step(dict(reversed(batch.items()))))


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    (model, loss, batch), plain, _ = both("mlp")
    program, constants, _ = captured(model, loss, batch)

    def made(parameters: Any) -> LiveStep:
        optimizer = ADAMW(parameters)
        return LiveStep(model, program, constants=constants, batch=batch, optimizer=optimizer)

    with pytest.raises(Mismatch, match="steps 8 parameters that the model does not have and lacks"):
        made(plain.parameters())
    with pytest.raises(Mismatch, match=r"lacks 0\.bias and 6 more"):
        made([next(iter(model.parameters()))])
    step = made(model.parameters())
    step.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(Mismatch, match="steps 1 parameters"):
        step(batch)
    with pytest.raises(BadInput, match="LBFGS"):
        LiveStep(
            model,
            program,
            constants=constants,
            batch=batch,
            optimizer=torch.optim.LBFGS(model.parameters()),
        )


def test_a_program_of_another_model_is_refused() -> None:
    (model, loss, batch), _, _ = both("mlp")
    program, constants, _ = captured(model, loss, batch)
    fewer = twins(model)[1]
    next(iter(fewer.parameters())).requires_grad_(False)
    with pytest.raises(Mismatch, match="plan"):
        LiveStep(fewer, program, constants=constants, batch=batch)
    wider = twins(model)[1]
    wider[0].weight = nn.Parameter(torch.ones(64, 32))
    with pytest.raises(Mismatch, match=r"float32\[64, 32\]"):
        LiveStep(wider, program, constants=constants, batch=batch)


def test_modes_that_the_graph_knows_nothing_of_are_refused() -> None:
    (model, loss, batch), plain, _ = both("mlp")
    step = live(model, loss, batch, optimizer=ADAMW)
    with torch.autocast("cpu"), pytest.raises(BadInput, match="autocast"):
        step(batch)
    with torch.inference_mode(), pytest.raises(BadInput, match="inference_mode"):
        step(batch)
    with pytest.raises(BadInput, match=r"torch\.compile"):
        torch.compile(step.backward, backend="eager")(batch)
    assert_same_model(plain, model)
    torch.compiler.reset()


def test_another_default_dtype_is_refused_before_anything_runs() -> None:
    (model, loss, batch), _, _ = both("mlp")
    step = live(model, loss, batch)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(Mismatch, match=r"default dtype is torch\.float64") as refused:
            step.backward(batch)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(str(refused.value).splitlines()) == 3
    assert all(p.grad is None for p in model.parameters())
    step.backward(batch)
