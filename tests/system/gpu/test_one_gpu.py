"""A step on a GPU of this machine: measured as predicted; and what is refused there."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steelyard as sy
from steelyard.comm.devices import CPU, torch_device_of
from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster, OffloadMemory
from steelyard.measure.cache import CostCache
from steelyard.planner.local_cluster import MAY_SHARE, local_cluster
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    return torch.device("cuda", torch.cuda.current_device())


def _gpt(device: torch.device, *, dropout: float) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = GPT(layers=4, width=256, heads=4, vocabulary=1000, length=256, dropout=dropout)
    batch = {name: x.to(device) for name, x in tokens(8, 256, 1000).items()}
    return model.to(device), batch


def _losses(step: Any, batch: Any, count: int = 4) -> list[float]:
    torch.manual_seed(3)
    return [float(step(batch)) for _ in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_plan_on_a_gpu_keeps_its_budget_and_losses(gpu: torch.device, dropout: float) -> None:
    model, batch = _gpt(gpu, dropout=dropout)
    plain, optimizer = copy.deepcopy(model), partial(torch.optim.AdamW, lr=1e-3)
    free = sy.plan(plain, next_token_loss, batch, optimizer=optimizer)
    limit = int(0.75 * free.predicted.memory_bytes.value)
    planned = sy.plan(
        model, next_token_loss, batch, optimizer=optimizer, budget=sy.Budget(memory=limit)
    )
    assert any(rule.trade == "recompute" for rule in planned.plan.decisions.rules)
    assert not any("not measured" in note for note in planned.plan.notes), planned.plan.notes
    step = planned.apply()
    assert _losses(step, batch) == _losses(free.apply(), batch)
    measured = step.receipt().receipt.measured
    predicted = planned.predicted.memory_bytes.value
    assert measured.memory_bytes == pytest.approx(predicted, rel=0.05)
    assert measured.memory_bytes <= limit
    assert measured.step_seconds > 0


@pytest.mark.gpu
def test_memory_of_a_gpu_is_that_of_the_device(gpu: torch.device) -> None:
    cluster = local_cluster(gpu, Cluster.here(), cache=CostCache())
    seen = torch.cuda.get_device_properties(gpu)
    assert cluster.device.memory_bytes == seen.total_memory
    assert cluster.device.kind == f"cuda {seen.name}"
    assert cluster.fingerprint != Cluster.here().fingerprint


@pytest.mark.gpu
def test_more_ranks_than_gpus_are_refused_or_share_one(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, seen = torch.cuda.device_count() + 1, torch.cuda.get_device_properties(gpu)
    alone = local_cluster(gpu, Cluster.here(ranks=1), cache=CostCache()).fastest
    monkeypatch.delenv(MAY_SHARE, raising=False)
    with pytest.raises(BadInput, match=f"{ranks} ranks were requested, but torch sees"):
        local_cluster(gpu, Cluster.here(ranks=ranks), cache=CostCache())
    monkeypatch.setenv(MAY_SHARE, "1")
    shared = local_cluster(gpu, Cluster.here(ranks=ranks), cache=CostCache())
    assert shared.num_devices == ranks
    assert shared.fastest.memory_bytes == alone.memory_bytes // 2
    assert shared.fastest.kind == f"cuda {seen.name}, shared by 2 ranks"
    # The same holds for each of several hosts.
    count = torch.cuda.device_count()
    hosts = local_cluster(gpu, Cluster.here(ranks=3 * count, hosts=3), cache=CostCache())
    assert (hosts.num_devices, hosts.hosts, hosts.fastest) == (3 * count, 3, alone)


def test_offload_and_compilers_are_refused_on_gpus(tmp_path: Path) -> None:
    there, cache = torch.device("cuda", 0), CostCache()
    offload_memory = OffloadMemory(tmp_path, "1GB/s", "1MiB")
    with pytest.raises(BadInput, match="is on cuda:0, but offload memory was given"):
        local_cluster(there, Cluster.here(offload_memory=offload_memory), cache=cache)
    with pytest.raises(BadInput, match="but the runner is inductor"):
        local_cluster(there, Cluster.here(), runner="inductor", cache=cache)
    declared = Cluster.named("dgx-h100")
    assert local_cluster(there, declared, cache=cache) is declared
    assert local_cluster(CPU, Cluster.here(ranks=2), cache=cache) == Cluster.here(ranks=2)


def test_a_model_on_several_devices_is_refused() -> None:
    assert torch_device_of(nn.Linear(2, 2, device="meta")) == CPU
    assert torch_device_of(nn.ReLU()) == CPU

    class Elsewhere(nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([_On("cuda:0"), _On("cpu")])

    with pytest.raises(BadInput, match="the model is on cpu and cuda:0"):
        torch_device_of(Elsewhere())


class _On(Tensor):
    """A module that only has a device."""

    def __new__(cls, device: str) -> _On:
        made: _On = torch.zeros(()).as_subclass(cls)
        made.said = torch.device(device)  # type: ignore[attr-defined]
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.said  # type: ignore[attr-defined, no-any-return]
