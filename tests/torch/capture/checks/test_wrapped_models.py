"""Models wrapped by another tool are refused by its name, with what to pass instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

import steelyard as sy
from steelyard.capture.checks.wrapped_models import refuse_wrapped
from steelyard.errors import CaptureRefused
from tests.support.stepping import source_of


@pytest.mark.parametrize(
    ("wrapped", "said"), [("", "the model was"), ("0", "module 0 was"), ("1.0", r"module 1\.0 was")]
)
def test_compiled_modules_are_refused_anywhere_in_the_model(wrapped: str, said: str) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    refuse_wrapped(model)
    compiled = torch.compile(model.get_submodule(wrapped))
    if wrapped:
        model.set_submodule(wrapped, compiled)
    with pytest.raises(CaptureRefused, match=f"{said} compiled by torch.compile") as refused:
        refuse_wrapped(model if wrapped else compiled)
    assert len(str(refused.value).splitlines()) == 3


@pytest.fixture
def group() -> Iterator[None]:
    """Make a process group of this process alone, without a network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def parallelised(model: nn.Module) -> nn.Module:
    return distribute_module(model, init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("wrap", "said", "remedy"),
    [
        (nn.parallel.DistributedDataParallel, "wrapped in DistributedDataParallel", "model.module"),
        (nn.DataParallel, "wrapped in DataParallel", "model.module"),
        (
            partial(FullyShardedDataParallel, device_id=torch.device("cpu")),
            "wrapped in FullyShardedDataParallel",
            "before it was wrapped",
        ),
        (sharded, r"was sharded by fully_shard \(FSDP2\)", "before fully_shard"),
        (parallelised, "0.weight is a DTensor", "before parallelize_module"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_a_wrapper_is_named_before_anything_is_measured(
    wrap: Callable[[nn.Module], nn.Module], said: str, remedy: str
) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        return model(batch).mean()

    wrapped = wrap(net())
    with pytest.raises(CaptureRefused, match=said) as refused:
        sy.plan(wrapped, loss, torch.randn(4, 4))
    assert remedy in refused.value.remedy
    assert "sy.Cluster.here(ranks=N)" in refused.value.remedy
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.usefixtures("group")
def test_a_wrapped_model_that_the_loss_calls_by_itself_is_named() -> None:
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(CaptureRefused, match="calls a model that is wrapped in Distributed"):
        source_of((model, lambda _, x: wrapped(x).mean(), torch.randn(4, 4))).captured()


@pytest.mark.usefixtures("group")
def test_tensors_of_a_mesh_are_found_among_buffers_too() -> None:
    model = net()
    buffer = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
    model.register_buffer("scale", buffer)
    with pytest.raises(CaptureRefused, match="scale is a DTensor"):
        refuse_wrapped(model)
