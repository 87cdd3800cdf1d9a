"""Settings for other tools are chosen within the plan's budget, and cost what is predicted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steelyard as sy
from steelyard.capture.deep.eager_levels import block_names
from steelyard.export.settings import Settings
from steelyard.export.target import ExportTarget, settings_for
from steelyard.measure.operators.memory import meter_once
from steelyard.planner.export.price import formats_of, priced_settings
from tests.harness import in_a_hurry

pytestmark = pytest.mark.slow
MIB = 2**20
ADAMW = partial(torch.optim.AdamW, lr=1e-3, foreach=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.inner = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(64, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


BATCH = torch.randint(64, (16, 128), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def planned(costs: Path) -> Iterator[sy.Planned]:
    torch.manual_seed(0)
    with in_a_hurry(costs):
        yield sy.plan(Model(), loss, BATCH, optimizer=ADAMW)


def chosen(planned: sy.Planned, mib: float | None, **changes: Any) -> tuple[Settings, float]:
    """Return the settings for this budget, and their predicted peak in bytes."""
    budget = sy.Budget() if mib is None else sy.Budget(memory=round(mib * MIB))
    decisions = replace(planned.plan.decisions, budget=budget)
    wanted = replace(settings_for(ExportTarget.FSDP2, decisions), device="cpu", **changes)
    found = priced_settings(planned.session, decisions, wanted)
    assert found.price is not None
    assert found.price.memory_bytes is not None
    return found.settings, found.price.memory_bytes.value


def test_without_changes_the_settings_cost_what_eager_pytorch_does(planned: sy.Planned) -> None:
    settings, peak = chosen(planned, None)
    assert not settings.recomputes_blocks
    assert peak == pytest.approx(planned.baseline.memory_bytes.value, rel=0.02)


def test_recomputation_and_micro_batches_are_added_until_the_budget_is_kept(
    planned: sy.Planned,
) -> None:
    _, whole = chosen(planned, None)
    _, recomputed = chosen(planned, None, recomputes_blocks=True)
    assert recomputed < 0.7 * whole
    settings, peak = chosen(planned, (whole - 1) / MIB)
    assert (settings.micro_batches, settings.recomputes_blocks) == (1, True)
    assert peak == recomputed
    settings, peak = chosen(planned, (recomputed - 1) / MIB)
    assert settings.micro_batches > 1
    assert peak < recomputed
    # If nothing keeps the budget, the settings with the least memory are named.
    _, least = chosen(planned, 0.1)
    assert least <= peak
    # Nothing is recomputed without need, even if the plan recomputes single values.
    settings, _ = chosen(planned, 10_000, recomputes_blocks=True)
    assert not settings.recomputes_blocks


def run_exported(path: Path, model: nn.Module) -> int:
    """Return the measured peak of a step by an exported file, with what is resident."""
    names: dict[str, Any] = {}
    exec(path.read_text(), names)
    model = names["apply"](model, device_type="cpu")
    optimizer = ADAMW(model.parameters())
    names["train_step"](model, loss, BATCH, optimizer)

    def step() -> None:
        names["train_step"](model, loss, BATCH, optimizer)

    optimizer.zero_grad()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    held = [*model.parameters(), *state, BATCH]
    return meter_once(step).peak_bytes + sum(t.nbytes for t in held)


@pytest.mark.parametrize("share", [0.9, 0.4])
def test_the_exported_file_takes_the_predicted_memory(
    planned: sy.Planned, share: float, tmp_path: Path
) -> None:
    budget = share * planned.baseline.memory_bytes.value
    _, predicted = chosen(planned, budget / MIB)
    planned = sy.Planned(
        planned._planner,
        replace(
            planned.plan,
            decisions=replace(planned.plan.decisions, budget=sy.Budget(memory=round(budget))),
        ),
    )
    found = planned.export("fsdp2", tmp_path / "exported.py")
    assert found.price is not None
    assert found.price.memory_bytes is not None
    assert found.price.memory_bytes.value == predicted
    measured = run_exported(tmp_path / "exported.py", Model())
    assert predicted == pytest.approx(measured, rel=0.03)
    assert found.fits
    assert measured <= budget


def test_a_batch_that_cannot_be_split_is_said_to_be(costs: Path) -> None:
    batch = torch.zeros(8, 16, dtype=torch.int64)
    with in_a_hurry(costs):
        same = sy.plan(Model(), loss, batch, optimizer=ADAMW)
        decisions = replace(same.plan.decisions, budget=sy.Budget(memory="100 KiB"))
        wanted = settings_for(ExportTarget.FSDP2, decisions)
        found = priced_settings(same.session, decisions, wanted)
    assert found.settings.micro_batches == 1
    assert any("no other number of micro-batches was tried" in note for note in found.notes)


def test_recomputed_blocks_take_about_one_more_forward_pass(planned: sy.Planned) -> None:
    def flops(settings: Settings) -> float:
        from steelyard.planner.export.price import _rules_of

        session = planned.session
        program = session.apply_rules(_rules_of(session, planned.plan.decisions, settings))
        return session.priced(program).flops

    plain, _ = chosen(planned, None)
    whole = flops(plain)
    recomputed = flops(replace(plain, recomputes_blocks=True))
    # A third of the step is its forward pass; the last products of a block are not needed again.
    assert 1.1 * whole < recomputed < 1.34 * whole


def test_the_formats_are_those_of_the_step(planned: sy.Planned) -> None:
    formats = formats_of(planned.session)
    assert (formats.weights, formats.products) == ("float32", "float32")


def test_a_wrong_target_is_refused(planned: sy.Planned, tmp_path: Path) -> None:
    with pytest.raises(sy.SteelyardError, match="target is 'slurm'"):
        planned.export("slurm", tmp_path / "file")
    found = planned.export("trainer", str(tmp_path / "train.json"))
    assert json.loads((tmp_path / "train.json").read_text())["use_cpu"] is True
    assert found.price is not None
    assert found.price.step_seconds is not None


def test_blocks_are_the_outermost_lists_of_one_class() -> None:
    assert block_names(Model()) == tuple(f"blocks.{i}" for i in range(6))
    assert block_names(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == ()
    nested = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)))
    assert block_names(nested) == ("0", "1")
    assert block_names(nn.Linear(2, 2)) == ()
