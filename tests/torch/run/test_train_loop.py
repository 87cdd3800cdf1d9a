"""The training loop: resumed runs, positions in the data, reports, and stopping."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from steelyard.errors import BadInput, CheckpointError, Mismatch, NonFinite, afterwards
from steelyard.run.checkpoint import directory as folder
from steelyard.run.train_loop import Checkpoints, Finished, StepReport, train
from tests.support.live import live
from tests.zoo import case
from tests.zoo.reference import assert_same_model

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Net(nn.Module):
    """A small model with dropout, BatchNorm, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.drop(self.norm(self.first(x))))
        return result


def square(model: nn.Module, batch: Any) -> Tensor:
    value: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return value


def dataset() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(20, 4, generator=made), torch.randn(20, 4, generator=made))


def shuffled() -> Any:
    return DataLoader(dataset(), batch_size=4, shuffle=True)


def shuffled_by_its_own() -> Any:
    generator = torch.Generator().manual_seed(11)
    return DataLoader(dataset(), batch_size=4, shuffle=True, generator=generator)


def listed() -> Any:
    return list(DataLoader(dataset(), batch_size=4))


def drawn() -> Any:
    """Yield batches, drawing from every global generator."""

    def epoch() -> Iterator[Any]:
        for x, y in DataLoader(dataset(), batch_size=4, shuffle=True):
            noise = torch.randn(4, 4) + random.random() + np.random.random()  # noqa: NPY002
            yield [x + noise, y]

    return epoch


def a_run(optimizer: Any = ADAMW) -> Any:
    torch.manual_seed(0)
    return live(Net(), square, listed()[0], optimizer=optimizer)


@pytest.mark.parametrize("data", [shuffled, shuffled_by_its_own, listed, drawn])
@pytest.mark.parametrize("cut", [3, 5, 7])
def test_a_resumed_run_ends_in_the_same_bits(data: Any, cut: int, tmp_path: Path) -> None:
    """An epoch has five batches; the run is interrupted in the first epoch, at its end, and in
    the second."""
    whole: list[float] = []
    straight = a_run()
    train(straight, data(), steps=12, seed=3, on_step=lambda r: whole.append(r.loss))

    parts: list[float] = []
    tell = partial(train, on_step=lambda r: parts.append(r.loss))
    tell(a_run(), data(), steps=cut, seed=3, checkpoints=Checkpoints(folder=tmp_path, every=100))
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002
    again = a_run()
    resumed = Checkpoints(folder=tmp_path, every=4, resume=True)
    done = tell(again, data(), steps=12, seed=3, checkpoints=resumed)
    assert parts == whole
    assert_same_model(straight.model, again.model)
    assert done.checkpoint == tmp_path / "step-000012"
    for p, q in zip(straight.model.parameters(), again.model.parameters(), strict=True):
        for key, value in straight.optimizer.state[p].items():
            assert torch.equal(value, again.optimizer.state[q][key])


@pytest.mark.parametrize("name", ["gpt", "resnet_bn"])
def test_a_resumed_model_of_the_zoo_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    made = case(name)

    def run() -> Any:
        model, loss, batch = made.make(0)
        return live(model, loss, batch, optimizer=ADAMW)

    straight, first, second = run(), run(), run()
    train(straight, made.batches(3), steps=5, seed=1)
    train(
        first, made.batches(3), steps=2, seed=1, checkpoints=Checkpoints(folder=tmp_path, every=1)
    )
    again = Checkpoints(folder=tmp_path, every=9, resume=tmp_path / "step-000002")
    train(second, made.batches(3), steps=5, checkpoints=again)
    assert_same_model(straight.model, second.model)


def test_resuming_from_an_older_checkpoint_sets_later_ones_aside(tmp_path: Path) -> None:
    train(a_run(), listed(), steps=6, seed=0, checkpoints=Checkpoints(folder=tmp_path, every=2))
    notes: list[str] = []
    older = Checkpoints(folder=tmp_path, every=2, resume=tmp_path / "step-000002")
    step = a_run()
    train(step, listed(), steps=6, on_note=notes.append, checkpoints=older)
    straight = a_run()
    train(straight, listed(), steps=6, seed=0)
    assert_same_model(straight.model, step.model)
    assert [n.split(":")[0] for n in notes] == [
        "renamed aside-step-000004, because it is later than step-000002",
        "renamed aside-step-000006, because it is later than step-000002",
    ]


@pytest.mark.parametrize("steps", [3, 4])
def test_a_finished_run_is_reported_and_changes_nothing(steps: int, tmp_path: Path) -> None:
    done, again = a_run(), a_run()
    train(done, listed(), steps=4, seed=0, checkpoints=Checkpoints(folder=tmp_path, every=2))
    notes: list[str] = []
    resumed = Checkpoints(folder=tmp_path, every=2, resume=True)
    finished = train(again, listed(), steps=steps, on_note=notes.append, checkpoints=resumed)
    assert finished.step == 4
    assert notes == [f"no step was taken: the checkpoint is at step 4 of {steps}"]
    assert_same_model(done.model, again.model)


def test_a_damaged_checkpoint_offers_the_one_before(tmp_path: Path) -> None:
    train(a_run(), listed(), steps=6, seed=0, checkpoints=Checkpoints(folder=tmp_path, every=2))
    for name in ("step-000006", "step-000004"):
        path = tmp_path / name / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    resume = Checkpoints(folder=tmp_path, every=2, resume=True)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has \d+ bytes") as error:
        train(a_run(), listed(), steps=8, checkpoints=resume)
    assert error.value.remedy.endswith(f"--resume {tmp_path / 'step-000002'}")


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path: Path) -> None:
    settings = Checkpoints(folder=tmp_path, every=2)
    train(a_run(), listed(), steps=2, checkpoints=settings)
    with pytest.raises(CheckpointError, match="holds checkpoints of an earlier run"):
        train(a_run(), listed(), steps=2, checkpoints=settings)
    empty = Checkpoints(folder=tmp_path / "other", every=2, resume=True)
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        train(a_run(), listed(), steps=2, checkpoints=empty)


def test_reports_and_the_metered_second_step() -> None:
    reports: list[StepReport] = []
    step = a_run()

    def meter(run: Any) -> int:
        assert all(p.grad is None for p in step.model.parameters())
        run()
        return 4096

    train(step, listed(), steps=4, seed=0, meter=meter, predicted_bytes=5, on_step=reports.append)
    assert [(r.step, r.steps, r.predicted_bytes) for r in reports] == [
        (i, 4, 5) for i in (1, 2, 3, 4)
    ]
    assert [r.peak_bytes for r in reports] == [None, 4096, None, None]
    assert [r.seconds is None for r in reports] == [False, True, False, False]
    straight = a_run()
    train(straight, listed(), steps=4, seed=0)
    assert_same_model(straight.model, step.model)


def test_a_loss_that_is_nan_stops_the_run_and_saves_nothing_new(tmp_path: Path) -> None:
    batches = listed()
    batches[3] = [batches[3][0] * float("nan"), batches[3][1]]
    seen: list[int] = []
    settings = Checkpoints(folder=tmp_path, every=1)
    with pytest.raises(NonFinite, match="nan at step 4") as error:
        train(
            a_run(), batches, steps=9, checkpoints=settings, on_step=lambda r: seen.append(r.step)
        )
    assert error.value.remedy.endswith(f"resume from {tmp_path / 'step-000003'}")
    assert seen == [1, 2, 3]
    assert sorted(p.name for p in tmp_path.glob("step-*")) == [f"step-00000{i}" for i in (1, 2, 3)]
    with pytest.raises(NonFinite, match="start again"):
        train(a_run(), batches, steps=9)


@pytest.mark.parametrize("how", ["the loader", "the step", "the forward"])
def test_a_step_that_fails_costs_none_of_those_before_it(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout, BatchNorm's statistics and the position in the data are as before the failed
    step."""
    batches = listed()

    def failing() -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number == 3 and how == "the loader":
                torch.randn(3)
                raise OSError("gone")
            yield [batch[0], batch[1].double()] if number == 3 and how == "the step" else batch

    step = a_run()
    if how == "the forward":
        bound = next(iter(step._bound.values()))
        run = bound.run
        calls: list[int] = []

        def half(*arguments: Any) -> Any:
            calls.append(1)
            value = run(*arguments)
            if len(calls) == 4:
                raise RuntimeError("index out of range")
            return value

        monkeypatch.setattr(bound, "run", half)
    settings = Checkpoints(folder=tmp_path, every=100)
    with pytest.raises((OSError, Mismatch, RuntimeError)) as error:
        train(step, failing, steps=9, seed=0, checkpoints=settings)
    assert afterwards(error.value) == [f"step 3 is saved; continue with --resume {tmp_path}"]
    straight, again = a_run(), a_run()
    train(straight, listed(), steps=9, seed=0)
    resume = Checkpoints(folder=tmp_path, every=100, resume=True)
    train(again, listed(), steps=9, checkpoints=resume)
    assert_same_model(straight.model, again.model)


def test_an_update_that_fails_leaves_nothing_to_save(tmp_path: Path) -> None:
    step = a_run()

    def fail(*_: object) -> None:
        if step.optimizer.state and min(s["step"] for s in step.optimizer.state.values()) == 3:
            raise RuntimeError("halfway")

    step.optimizer.register_step_post_hook(fail)
    with pytest.raises(RuntimeError, match="halfway") as error:
        train(step, listed(), steps=9, checkpoints=Checkpoints(folder=tmp_path, every=2))
    assert afterwards(error.value) == []
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-000002"]


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"]
)
def test_a_signal_waits_for_the_step_and_saves(
    number: signal.Signals, exit_code: int, tmp_path: Path
) -> None:
    handlers = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]

    def act(report: StepReport) -> None:
        if report.step == 3:
            os.kill(os.getpid(), number)

    settings = Checkpoints(folder=tmp_path, every=100)
    done = train(a_run(), listed(), steps=9, seed=0, on_step=act, checkpoints=settings)
    assert done == Finished(
        step=3,
        loss=done.loss,
        stopped_by=number.name,
        exit_code=exit_code,
        checkpoint=tmp_path / "step-000003",
    )
    assert handlers == [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]
    straight, again = a_run(), a_run()
    train(straight, listed(), steps=9, seed=0)
    resume = Checkpoints(folder=tmp_path, every=100, resume=True)
    train(again, listed(), steps=9, checkpoints=resume)
    assert_same_model(straight.model, again.model)


def test_a_second_interrupt_does_not_wait() -> None:
    def act(_: StepReport) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(a_run(), listed(), steps=9, on_step=act)


def test_a_full_disk_during_a_run_is_noted_and_at_its_end_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = folder._flush
    full = False

    def flushing(path: Path) -> None:
        if full:
            raise OSError(28, "No space left on device")
        flush(path)

    monkeypatch.setattr(folder, "_flush", flushing)
    notes: list[str] = []

    def fill(report: StepReport) -> None:
        nonlocal full
        full = 3 <= report.step < until

    until = 5
    settings = Checkpoints(folder=tmp_path, every=2)
    done = train(
        a_run(), listed(), steps=6, on_step=fill, on_note=notes.append, checkpoints=settings
    )
    assert done.checkpoint == tmp_path / "step-000006"
    assert len(notes) == 1
    assert "step-000004 could not be saved: No space left on device" in notes[0]
    until = 99
    full = False
    other = Checkpoints(folder=tmp_path / "other", every=2)
    with pytest.raises(CheckpointError, match="step-000006 could not be saved"):
        train(a_run(), listed(), steps=6, on_step=fill, checkpoints=other)
    assert [p.name for p in (tmp_path / "other").glob("step-*")] == ["step-000002"]


def test_batches_that_end_for_good_are_an_error() -> None:
    with pytest.raises(BadInput, match="ended after 5"):
        train(a_run(), iter(listed()), steps=9)
    with pytest.raises(BadInput, match="ended after 0"):
        train(a_run(), [], steps=9)
    assert train(a_run(), iter(listed()), steps=5).step == 5
    assert train(a_run(), lambda: iter(listed()), steps=7).step == 7


def test_resuming_with_less_data_is_an_error(tmp_path: Path) -> None:
    settings = Checkpoints(folder=tmp_path, every=4)
    train(a_run(), listed(), steps=4, checkpoints=settings)
    resume = Checkpoints(folder=tmp_path, every=4, resume=True)
    with pytest.raises(BadInput, match="an epoch has"):
        train(a_run(), listed()[:3], steps=6, checkpoints=resume)
