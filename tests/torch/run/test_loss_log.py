"""The loss log has each step once, whatever was killed, resumed or started again."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard.api import Workload, run_workload
from steelyard.api.planning import plan_workload
from steelyard.plans.budget import Budget
from steelyard.run.loss_log import Losses, losses_path


def square(model: nn.Module, batch: Any) -> Tensor:
    value: Tensor = model(batch).square().mean()
    return value


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(plan: Path, *, steps: int, checkpoint: Path, resume: bool, **how: Any) -> dict[int, float]:
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=1e-2)
    workload = Workload(nn.Linear(8, 8), square, [torch.ones(4, 8)], optimizer=sgd)
    planned = plan_workload(workload, budget=Budget())
    told: dict[int, float] = {}
    run_workload(
        planned, workload, steps=steps, checkpoint=checkpoint, checkpoint_every=2, resume=resume,
        losses=plan, on_step=lambda r: told.update({r.step: r.loss}), **how,
    )  # fmt: skip
    return told


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    plan, saved = tmp_path / "train.plan.toml", tmp_path / "saved"
    path = tmp_path / "train.losses.jsonl"
    assert losses_path(plan) == path
    first = run(plan, steps=4, checkpoint=saved, resume=False)
    # The file is as if the run had been killed in step 7, with the checkpoint of step 4 on the
    # disk.
    with path.open("a") as file:
        file.write('{"step": 5, "loss": 9.0}\n{"step": 6, "loss": 9.0}\n{"step": 7, "lo')
    second = run(plan, steps=6, checkpoint=saved, resume=True)
    found = lines_of(path)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in found] == [*first.values(), *second.values()]
    assert [line["seconds"] is None for line in found] == [False, True, False, False, False, True]
    assert {line["lr"] for line in found} == {0.01}
    assert all(a["time"] <= b["time"] for a, b in pairwise(found))


def test_a_new_run_starts_a_new_log_and_keeps_the_old_one(tmp_path: Path) -> None:
    plan = tmp_path / "train.plan.toml"
    first = run(plan, steps=3, checkpoint=tmp_path / "a", resume=False)
    run(plan, steps=2, checkpoint=tmp_path / "b", resume=False)
    assert [line["step"] for line in lines_of(tmp_path / "train.losses.jsonl")] == [1, 2]
    before = lines_of(tmp_path / "train.losses.before.jsonl")
    assert [line["loss"] for line in before] == [*first.values()]


def test_every_step_is_written_at_once_with_the_mode_of_the_umask(
    tmp_path: Path,
) -> None:
    umask = os.umask(0o027)
    try:
        losses = Losses(tmp_path / "train.plan.toml", pytest.fail)
        losses.add(step=1, loss=2.0, seconds=0.5, lr=[0.1, 0.2])
    finally:
        os.umask(umask)
    path = tmp_path / "train.losses.jsonl"
    (line,) = lines_of(path)
    assert (line["step"], line["loss"], line["seconds"], line["lr"]) == (1, 2.0, 0.5, [0.1, 0.2])
    assert path.stat().st_mode & 0o777 == 0o640
    losses.close()
    resumed = Losses(tmp_path / "train.plan.toml", pytest.fail)
    resumed.add(step=2, loss=1.0, seconds=0.5, lr=None)
    resumed.close()
    assert [line["step"] for line in lines_of(path)] == [1, 2]
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.losses.jsonl"]


def test_an_unwritable_loss_log_is_reported_once_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.losses.jsonl").mkdir()
    told: list[str] = []
    losses = Losses(tmp_path / "train.plan.toml", told.append)
    for step in (1, 2):
        losses.add(step=step, loss=2.0, seconds=0.5, lr=None)
    losses.close()
    assert told == ["losses are not written to train.losses.jsonl: it is not a regular file"]


def test_a_full_disk_is_reported_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, told = tmp_path / "train.plan.toml", list[str]()
    (tmp_path / "train.losses.jsonl").symlink_to("/dev/full")
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr(Path, "replace", lambda path, target: target)
    losses = Losses(plan, told.append)
    losses.add(step=1, loss=2.0, seconds=0.5, lr=None)
    losses.add(step=2, loss=2.0, seconds=0.5, lr=None)
    losses.close()
    assert told == ["losses are not written to train.losses.jsonl: No space left on device"]


class Writer:
    """The part of torch's SummaryWriter that is called."""

    made: list[Writer]

    def __init__(self, *, log_dir: str, purge_step: int | None, flush_secs: int) -> None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        self.folder, self.purge_step, self.is_closed = log_dir, purge_step, False
        self.scalars: list[tuple[str, float, int]] = []
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("is_broken", [False, True])
def test_losses_are_written_to_tensorboard_if_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    module = ModuleType("torch.utils.tensorboard")
    Writer.made = []
    if not is_broken:
        module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr("steelyard.run.loss_log.find_spec", lambda name: name)
    plan, told = tmp_path / "train.plan.toml", list[str]()
    for first in (1, 1, 3):
        losses = Losses(plan, told.append)
        losses.add(step=first, loss=2.0, seconds=None, lr=0.1)
        losses.close()
    if is_broken:
        assert [text[:40] for text in told] == ["losses are not written for TensorBoard: "] * 3
        return
    new, newer, resumed = Writer.made
    assert told == []
    assert new.scalars == [("loss", 2.0, 1), ("lr", 0.1, 1)]
    assert Path(new.folder).parent == tmp_path / "train.tensorboard"
    assert [one.purge_step for one in Writer.made[:1]] == [None]
    assert resumed.folder == newer.folder
    assert resumed.purge_step == 3
    assert all(one.is_closed for one in Writer.made)
