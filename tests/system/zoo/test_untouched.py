"""Planning does not change the user's model, batch and random state, however it ends."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard import _torch
from steelyard.errors import CaptureRefused
from tests.support.stepping import assert_untouched, source_of, state_of
from tests.zoo import case, reference
from tests.zoo.case import square_loss

NAMED = (
    *("gpt", "resnet_bn", "lstm", "hf_t5", "hf_bloom", "hf_mamba", "edge_tensor_hook"),
    *("edge_weight_norm", "edge_spectral_norm", "edge_tied_module", "edge_buffer_not_persistent"),
)


def plan_everything(sample: Any) -> None:
    source = source_of(
        sample, for_planning=True, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3)
    )
    source.captured()
    source.splitting()
    source.twin()
    source.update()


@pytest.mark.parametrize("name", NAMED)
def test_planning_leaves_no_trace_and_eager_training_goes_on(
    name: str, new_fakes: Callable[[], list[Any]]
) -> None:
    model, loss, batch = case(name).make()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    batch_before = [(id(x), x.clone()) for x in _tensors(batch)]
    before = state_of(model)
    plan_everything((model, loss, batch))
    assert_untouched(before, model)
    for (identity, values), now in zip(batch_before, _tensors(batch), strict=True):
        assert identity == id(now)
        assert torch.equal(values, now)
    assert new_fakes() == []
    twin, _, _ = case(name).make()
    expected = reference.eager_step(twin, loss, batch, 3)
    actual = reference.eager_step(model, loss, batch, 3)
    for kind in (1, 2):
        reference.assert_same(expected[kind], actual[kind])


def _tensors(batch: Any) -> list[Tensor]:
    return [x for x in _torch.tree_leaves(batch) if isinstance(x, Tensor)]


def fakes() -> list[Any]:
    return [x for x in gc.get_objects() if type(x) is _torch.FakeTensor]


@pytest.fixture
def new_fakes() -> Callable[[], list[Any]]:
    """Return the fake tensors that were not there before, whatever else this process has
    captured."""
    before = fakes()
    known = {id(x) for x in before}

    def new() -> list[Any]:
        assert len(before) == len(known)  # the known objects are still alive, so no id is reused
        found: list[Any] = []
        for _ in range(3):  # the next round finds what finalisers have released
            found.clear()
            gc.collect()
            found += (x for x in fakes() if id(x) not in known)
            if not found:
                break
        return found

    return new


def test_planned_models_can_be_garbage_collected() -> None:
    model, loss, batch = case("gpt").make()
    plan_everything((model, loss, batch))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_planning_twice_gives_the_same_graph() -> None:
    sample = case("hf_t5").make()
    first, second = (source_of(sample).captured().graph for _ in range(2))
    assert first.nodes == second.nodes
    assert first.storages == second.storages
    assert first.outputs == second.outputs


# --- planning that fails early --------------------------------------------------------------------


class Once(nn.Module):
    """A model that changes its surroundings in each forward pass."""

    def __init__(self, effect: Callable[[Once, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))
        self.__dict__["effect"] = effect
        self.calls = 0
        self.kept: list[Any] = []
        self.table: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.effect(self, self.layer(x))
        return result


def counted(model: Once, x: Tensor) -> Tensor:
    model.calls += 1
    model.kept.append(x.detach())
    model.table["last"] = x.detach()
    model.last = x.detach()
    return x


def interrupted(model: Once, x: Tensor) -> Tensor:
    counted(model, x)
    raise KeyboardInterrupt


def broken(model: Once, x: Tensor) -> Tensor:
    counted(model, x)
    raise ZeroDivisionError("of the user's own")


@pytest.mark.parametrize(
    ("effect", "error"),
    [(counted, CaptureRefused), (broken, CaptureRefused), (interrupted, KeyboardInterrupt)],
)
def test_aborted_planning_leaves_no_trace(effect: Any, error: Any) -> None:
    model = Once(effect)
    batch = {"x": torch.randn(4, 8)}
    before = state_of(model)
    with pytest.raises(error):
        plan_everything((model, square_loss, batch))
    assert_untouched(before, model)
    assert not hasattr(model, "last")
    # No fake mode is left active that would affect unrelated code.
    assert type(torch.ones(2)) is Tensor
    model.__dict__["effect"] = lambda model, x: x
    model(batch["x"]).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_an_interruption_while_dynamo_traces_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, loss, batch = case("gpt").make()
    before = state_of(model)

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_torch, "aot_export_joint_with_descriptors", interrupt)
        with pytest.raises(KeyboardInterrupt):
            source_of((model, loss, batch)).captured()
    assert_untouched(before, model)
    assert type(torch.ones(2)) is Tensor
    assert source_of((model, loss, batch)).captured().graph.problems() == []


# --- caches of the user ---------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def remembered(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32)


GLOBAL: dict[int, Tensor] = {}


def in_a_global(length: int) -> Tensor:
    if length not in GLOBAL:
        GLOBAL[length] = torch.arange(length, dtype=torch.float32)
    return GLOBAL[length]


class Helper:
    """An object that is not a module and that Steelyard does not examine."""

    def __init__(self) -> None:
        self.held: dict[int, Tensor] = {}
        self.listed: list[Tensor] = []

    def __call__(self, length: int) -> Tensor:
        if length not in self.held:
            self.held[length] = torch.arange(length, dtype=torch.float32)
            self.listed.append(self.held[length])
        return self.held[length]


class WithCache(nn.Module):
    def __init__(self, cache: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.__dict__["cache"] = cache

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + self.cache(x.shape[1])
        return result


@pytest.mark.parametrize("full", [False, True], ids=["empty", "full of another length"])
@pytest.mark.parametrize("kind", ["lru_cache", "global dict", "helper object"])
def test_caches_hold_no_fake_tensors_afterwards(
    kind: str, full: bool, new_fakes: Callable[[], list[Any]]
) -> None:
    helper = Helper()
    cache = {"lru_cache": remembered, "global dict": in_a_global, "helper object": helper}[kind]
    GLOBAL.clear()
    remembered.cache_clear()
    if full:
        cache(5)
    model = WithCache(cache)
    batch = {"x": torch.randn(4, 8)}
    # The capture may be refused (filling a cache is a side effect), but the model must not be
    # damaged.
    with contextlib.suppress(CaptureRefused):
        source_of((model, square_loss, batch)).captured()
    assert new_fakes() == []
    assert type(cache(8)) is Tensor
    square_loss(model, batch).backward()
    assert model.layer.weight.grad is not None
    # The cache that a real pass filled is a constant of the step.
    captured = source_of((model, square_loss, batch)).captured()
    assert captured.graph.problems() == []


def test_a_refused_hooks_list_keeps_no_fake_tensors() -> None:
    seen: list[Tensor] = [torch.ones(1)]
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    with pytest.raises(CaptureRefused, match="forward hook of model"):
        source_of((model, square_loss, {"x": torch.randn(4, 8)})).captured()
    assert [type(x) for x in seen] == [Tensor]
