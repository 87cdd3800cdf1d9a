"""One captured step beside one step of plain PyTorch, each on a model of its own.

Not a test: what the tests of this folder share.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.capture.step import CapturedStep
from steelyard.hardware.cluster import Device
from steelyard.ir.program import Program
from steelyard.measure.operators.memory import Metered, meter_once
from steelyard.predict import predict
from steelyard.predict.cost_table import CostTable
from steelyard.run.step import LiveStep
from tests.zoo import Case, Sample, Scale, reference

# The device is declared, so that nothing is timed.
DEVICE = Device(
    kind="declared for tests", flops_per_second=80e9, bytes_per_second=16e9, memory_bytes=1 << 40
)
COSTS = CostTable(device=DEVICE)
SEED = 7

Answers = tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]


def source_of(sample: Sample, **settings: Any) -> CapturedStep:
    model, loss, batch = sample
    return CapturedStep(model=model, loss=loss, batch=batch, **settings)


def live(source: CapturedStep, *, micro_batches: int = 1) -> LiveStep:
    captured = source.captured(micro_batches=micro_batches)
    return LiveStep(
        source.model,
        Program.plain(captured.graph).repeated(micro_batches),
        constants=captured.constants,
        batch=source.batch,
        reduction=source.reduction().value if micro_batches > 1 else "mean",
    )


def captured_step(step: LiveStep, batch: Any, *, seed: int = SEED) -> Answers:
    """Return loss, gradients and buffers in the form of ``reference.eager_step``."""
    step.zero_grad()
    torch.manual_seed(seed)
    value = step.backward(batch)
    return value.clone(), reference.gradients(step.model), reference.buffers(step.model)


def eager_twin_of(case: Case, *, scale: Scale = "tiny", seed: int = SEED) -> Answers:
    """Make the same case again; a copy would lose hooks."""
    return reference.eager_step(*case.make(0, scale), seed)


def differences(expected: Answers, actual: Answers) -> list[str]:
    return [
        f"{what} differ: {said}"
        for what, said in (
            ("losses", reference.difference({"loss": expected[0]}, {"loss": actual[0]})),
            ("gradients", reference.difference(expected[1], actual[1])),
            ("buffers", reference.difference(expected[2], actual[2])),
        )
        if said
    ]


def worst_relative_difference(expected: Answers, actual: Answers) -> float:
    """Return the largest difference of loss and gradients, relative to the largest element of each.

    NaN equals NaN.
    """
    pairs: Iterable[tuple[Tensor | None, Tensor | None]] = [
        (expected[0], actual[0]),
        *((expected[1][name], actual[1][name]) for name in expected[1]),
    ]
    worst = 0.0
    for left, right in pairs:
        assert (left is None) == (right is None)
        if left is None or right is None or not left.numel():
            continue
        gap = (left - right).abs()
        gap[left.isnan() & right.isnan()] = 0
        worst = max(worst, float(gap.max() / left.nan_to_num().abs().max().clamp(min=1e-30)))
    return worst


def metered(step: LiveStep, batch: Any) -> Metered:
    """Return the bytes that a warm forward and backward pass adds, from a clean level."""
    for _ in range(2):
        step.backward(batch)
        step.zero_grad()
    with undisturbed():
        return meter_once(lambda: step.backward(batch))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Disable garbage collection within the context, because collecting takes longer than a
    step."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def predicted_above(program: Program, costs: CostTable) -> int:
    """Return the predicted peak beyond the bytes at the beginning of the step."""
    prediction = predict(program, costs)
    return prediction.peak.nbytes - prediction.peak.resident_bytes


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return everything about a model that planning must not change, as plain values and ids."""
    found: dict[str, Any] = {
        "parameters": {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)},
        "buffers": {n: id(b) for n, b in model.named_buffers(remove_duplicate=False)},
        "values": {n: t.detach().clone() for n, t in model.state_dict(keep_vars=True).items()},
        "grads": {n: None if p.grad is None else id(p.grad) for n, p in model.named_parameters()},
        "trained": {n: p.requires_grad for n, p in model.named_parameters()},
        "hooks": {n: list(p._backward_hooks or ()) for n, p in model.named_parameters()},
        "random": torch.get_rng_state(),
    }
    for name, module in model.named_modules():
        held = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers")}
        found[f"module {name}"] = {
            k: copy.copy(v) if isinstance(v, (dict, list, set)) else v for k, v in held.items()
        }
    return found


def assert_untouched(before: dict[str, Any], model: nn.Module) -> None:
    after = state_of(model)
    for what, was in before.items():
        now = after[what]
        if what == "values":
            reference.assert_same(was, now, "values")
        elif what == "random":
            assert torch.equal(was, now), "the random state moved"
        elif what.startswith("module"):
            assert was.keys() == now.keys(), what
            for key in was:
                same = was[key] is now[key] or _same(was[key], now[key])
                assert same, f"{what}: {key} was {was[key]!r}, is {now[key]!r}"
        else:
            assert was == now, f"{what} changed"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(a[k] is b[k] or _same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(x is y or _same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, weakref.ref) and isinstance(b, weakref.ref):
        return a() is b()
    if isinstance(a, (Tensor, nn.Module)):
        return False
    return type(a) is type(b) and bool(a == b)
