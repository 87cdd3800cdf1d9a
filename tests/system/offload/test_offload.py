"""Offload memory from the public API to a receipt: chosen if nothing else fits, and exact."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steelyard as sy
from steelyard.errors import BadInput, Infeasible, PlanFileError
from tests.harness import floor_bytes, in_a_hurry

ADAM = partial(torch.optim.AdamW, lr=1e-3)
MIB = 1 << 20


pytestmark = pytest.mark.xdist_group("far")


@pytest.fixture(scope="module", autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    with in_a_hurry(costs):
        yield


class Rows(nn.Module):
    """A step with one sample, so that the batch cannot be split, and random masks, which are
    never recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        return x


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Rows().train(), torch.randn(1, 4096, 128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("far")


@pytest.fixture(scope="module")
def planned(folder: Path) -> sy.Planned:
    model, x = made()
    offload_memory = sy.OffloadMemory(folder, rate="1 GB/s", size="1 GiB")
    whole = sy.plan(
        model, loss, x, optimizer=ADAM, cluster=sy.Cluster.here(offload_memory=offload_memory)
    )
    return whole.what_if(memory=_between(model, x, offload_memory))


def _between(model: nn.Module, x: Tensor, offload_memory: sy.OffloadMemory) -> int:
    """Return a budget between the least memory without offload memory and that with it."""
    least = []
    for cluster in (sy.Cluster.here(), sy.Cluster.here(offload_memory=offload_memory)):
        whole = sy.plan(model, loss, x, optimizer=ADAM, cluster=cluster)
        with pytest.raises(Infeasible) as refusal:
            whole.what_if(memory=floor_bytes(whole))
        assert refusal.value.least_bytes is not None
        least.append(refusal.value.least_bytes)
    without, with_it = least
    assert with_it < without - MIB
    return (without + with_it) // 2


def test_the_offloading_plan_fits_where_no_other_does(planned: sy.Planned) -> None:
    taken = [t for t in planned.plan.taken if t.trade == "offload"]
    assert taken
    assert sum(t.buys_bytes for t in taken) > 0
    rules = [r for r in planned.plan.decisions.rules if r.trade == "offload"]
    assert sum(r.count for t in taken for r in t.rules) == sum(r.count for r in rules)
    assert planned.plan.decisions.offload_memory is not None
    assert planned.predicted.memory_bytes.value <= planned.plan.decisions.budget.memory_bytes
    assert planned.predicted.communication_bytes.value > 0
    assert planned.predicted.accuracy_loss == "exact"
    assert "offload" in str(planned)


def assert_trained_alike(planned: sy.Planned, *, steps: int, rows: int = 4096) -> Any:
    """Check losses and weights of the planned step after some steps against those without a
    plan."""
    ours, x = made()
    theirs = copy.deepcopy(ours)
    step, plain = planned.apply(ours), planned.what_if().apply(theirs)
    losses = []
    for run in (step, plain):
        torch.manual_seed(3)
        losses.append([float(run(x[:, :rows])) for _ in range(steps)])
    # Values read in slices are summed in another order; which values are sliced depends on measured
    # times.
    is_sliced = any(getattr(rule, "slices", 0) > 1 for rule in planned.plan.decisions.rules)
    rel = 1e-6 if is_sliced else 0.0
    assert losses[0] == pytest.approx(losses[1], rel=rel, abs=0.0)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e-6 if is_sliced else 0.0, msg=name)
    return step


def test_losses_and_weights_are_those_of_the_unplanned_step(
    planned: sy.Planned, folder: Path
) -> None:
    step = assert_trained_alike(planned, steps=4)
    measured = step.receipt().measured
    budget = planned.plan.decisions.budget.memory_bytes
    assert measured.memory_bytes is not None
    assert budget is not None
    assert measured.memory_bytes <= budget
    predicted = planned.predicted.memory_bytes.value
    assert measured.memory_bytes == pytest.approx(predicted, rel=0.01)
    assert measured.communication_seconds
    assert measured.computation_seconds is not None
    assert measured.step_seconds is not None
    assert measured.computation_seconds <= measured.step_seconds
    moved = planned.predicted.communication_bytes.value
    assert step.offload_file is not None
    before = step.offload_file.moved_bytes
    step(made()[1])
    # The first step fetches no state, because there is none yet.
    assert step.offload_file.moved_bytes - before == moved
    assert list(folder.iterdir()) == []


def test_the_plan_file_names_the_offload_folder_and_is_read_back(
    planned: sy.Planned, tmp_path: Path
) -> None:
    path = tmp_path / "train.plan.toml"
    planned.save(path)
    text = path.read_text()
    assert "[offload_memory]" in text
    assert 'rate = "1 GB/s"' in text
    assert "lag = " in text
    model, x = made()
    again = sy.load(path, model, loss, x, optimizer=ADAM)
    ours, theirs = planned.plan.decisions, again.plan.decisions
    assert (theirs.offload_memory, sorted(theirs.rules)) == (
        ours.offload_memory,
        sorted(ours.rules),
    )
    assert again.plan.predicted.peak.nbytes == planned.plan.predicted.peak.nbytes
    torch.manual_seed(1)
    assert float(again.apply(model)(x)) > 0


def test_an_offloading_plan_without_a_folder_is_refused(
    planned: sy.Planned, tmp_path: Path
) -> None:
    path = tmp_path / "train.plan.toml"
    planned.save(path)
    text = path.read_text()
    start = text.index("[offload_memory]")
    path.write_text(text[:start] + text[text.index("[[", start) :])
    model, x = made()
    with pytest.raises(PlanFileError, match=r"has no \[offload_memory\]"):
        sy.load(path, model, loss, x, optimizer=ADAM)


def test_a_missing_offload_folder_is_named_before_the_run(
    planned: sy.Planned, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "train.plan.toml"
    planned.save(path)
    path.write_text(path.read_text().replace(str(folder), str(tmp_path / "gone")))
    model, x = made()
    with pytest.raises(BadInput, match=r"the folder .* does not exist"):
        sy.load(path, model, loss, x, optimizer=ADAM)


def test_plan_check_reports_too_little_offload_memory(planned: sy.Planned, tmp_path: Path) -> None:
    path = tmp_path / "train.plan.toml"
    planned.save(path)
    path.write_text(path.read_text().replace('size = "1 GiB"', 'size = "64 KiB"'))
    model, x = made()
    with pytest.raises(BadInput, match=r"which may hold 64\.0 KiB"):
        sy.load(path, model, loss, x, optimizer=ADAM)


def test_a_smaller_batch_moves_the_same_values(planned: sy.Planned) -> None:
    assert_trained_alike(planned, steps=2, rows=2)


@pytest.mark.parametrize("rate", ["2 GB/s", "50 MB/s"])
def test_fitting_does_not_depend_on_the_offload_rate(
    planned: sy.Planned, folder: Path, rate: str
) -> None:
    model, x = made()
    budget = planned.plan.decisions.budget
    offload_memory = sy.OffloadMemory(folder, rate=rate, size="1 GiB")
    other = sy.plan(
        model,
        loss,
        x,
        optimizer=ADAM,
        cluster=sy.Cluster.here(offload_memory=offload_memory),
        budget=budget,
    )
    assert {t.trade for t in other.plan.taken} >= {"offload"}


def test_without_offload_memory_the_reason_names_the_option() -> None:
    model, x = made()
    bare = sy.plan(model, loss, x)
    assert "--offload-dir" in bare.why_not("offload")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rate": "fast", "size": "1 GiB"}, "rate = 'fast' is not an amount"),
        ({"rate": "0 MB/s", "size": "1 GiB"}, "not a possible amount"),
        ({"rate": "1 GB/s", "size": "much"}, "size = 'much' is not an amount"),
        ({"rate": "1 GB/h", "size": "1 GiB"}, "is not an amount"),
        ({"rate": "500", "size": "1 GiB"}, "a rate of 500 B/s cannot be used as offload memory"),
        ({"rate": "1 GB/s", "size": "1000B"}, "a size of 1000 B is too small to hold a value"),
    ],
)
def test_an_invalid_amount_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        sy.OffloadMemory("/scratch", **given)


def test_inductor_plans_offload_nothing_and_explain_why(folder: Path) -> None:
    model, x = made()
    offload_memory = sy.OffloadMemory(folder, rate="1 GB/s", size="1 GiB")
    planned = sy.plan(
        model, loss, x, cluster=sy.Cluster.here(offload_memory=offload_memory), runner="inductor"
    )
    assert "Inductor compiles each pass as a whole" in planned.why_not("offload")
    assert not planned.plan.decisions.rules
