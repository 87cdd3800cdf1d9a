"""``steelyard run`` of a plan for two ranks: one receipt, one restart after a kill, the same
bits."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors import safe_open

from steelyard.cli import main
from tests.harness import in_a_hurry
from tests.system.launch.test_launcher import listening

pytestmark = [pytest.mark.dist, pytest.mark.slow]

_SCRIPT = """
import os, signal, time
from functools import partial

import torch
from torch import nn

import steelyard as sy


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def batches():
    generator = torch.Generator().manual_seed(3)
    for step in range(6):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if step == 4 and first and os.environ.get("RANK") == os.environ.get("KILLED"):
            os.kill(os.getpid(), getattr(signal, os.environ.get("SIGNAL", "SIGKILL")))
        time.sleep(float(os.environ.get("PAUSE", "0")))
        count = 12 if step == 4 and os.environ.get("RANK") == os.environ.get("ODD", "none") else 8
        yield {name: torch.randn(count, 16, generator=generator) for name in ("x", "y")}


def workload():
    torch.manual_seed(2)
    dropout = nn.Dropout(float(os.environ.get("DROPOUT", "0.2")))
    model = nn.Sequential(nn.Linear(16, 32), dropout, nn.GELU(), nn.Linear(32, 16))
    return sy.Workload(model, loss, batches, partial(torch.optim.AdamW, lr=1e-2))
"""
_PARTS = """
[[overlap]]
window = 1
""" + "".join(
    f"""
[[shard_tensor]]
ranks = 2
parameter = "{name}"
dim = {dim}
"""
    for name, dim in (("0.bias", 0), ("0.weight", 0), ("3.weight", 1))
)
_STAGES = """
[[accumulate]]
micro_batches = 4

[[shard_pipeline]]
ranks = 2
schedule = "1F1B"
behind = "1"
"""
_SHARES = """
[[shard_states]]
ranks = 2
parameter = "0.weight"
count = 1
"""
_ON_TWO = '\n[[overlap]]\nwindow = 1\n\n[[shard_batch]]\nranks = 2\nbucket = "64 KiB"\n'


def steelyard(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "steelyard", *arguments],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def here(folder: Path, *arguments: str, **environ: str) -> str:
    """Return the output of a command run in this process, which has already imported everything."""
    said = io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, environ),
        contextlib.redirect_stdout(said),
    ):
        assert main(arguments) == 0
    return said.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, costs: Path) -> Iterator[Path]:
    """Return a folder with a script and a plan edited for two ranks, although one would be
    faster."""
    path = tmp_path_factory.mktemp("ranks")
    (path / "train.py").write_text(_SCRIPT)
    with in_a_hurry(costs):
        assert "among 2 ranks" in here(path, "plan", "train.py", "--ranks", "2", "--quiet")
        plan = path / "train.plan.toml"
        text = _undecided(plan.read_text())
        assert "\nranks = 2\n" in text
        plan.write_text(text + _ON_TWO)
        yield path


def _undecided(plan: str) -> str:
    """Return a plan for the same model and ranks without a rule; on slow cores two ranks may be
    faster."""
    head, budget, rest = plan.partition("\n[budget]\n")
    return head + budget + rest.partition("\n[[")[0]


def tensors(checkpoint: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of the model and of the optimizer."""
    found = {}
    for path in (checkpoint / "model.safetensors", checkpoint / "optimizer.safetensors"):
        with safe_open(path, framework="numpy") as file:
            found |= {f"{path.stem} {n}": file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    return found


def weights(checkpoint: Path) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in tensors(checkpoint).items()}


@pytest.mark.long
def test_training_after_a_killed_rank_restarts_with_the_same_bits(folder: Path) -> None:
    run = ("run", "train.py", "--steps", "6", "--checkpoint-every", "1", "--rank-timeout", "60s")
    whole = steelyard(folder, *run, "--checkpoint", "whole")
    assert whole.returncode == 0, whole.stderr
    assert "started again" not in whole.stderr
    said = json.loads((folder / "train.plan.json").read_text())["measured"]
    assert (said["steps"], said["first_step"]) == (6, 1)
    assert said["communication_seconds"] is None
    assert any("for other ranks" in note for note in said["notes"])

    killed = steelyard(folder, *run, "--checkpoint", "killed", KILLED="1")
    assert killed.returncode == 0, killed.stderr
    assert killed.stderr.count("started again") == 1
    assert "rank 1 was killed" in killed.stderr
    said = json.loads((folder / "train.plan.json").read_text())["measured"]
    assert (said["steps"], said["first_step"]) == (6, 5)
    assert weights(folder / "killed" / "step-000006") == weights(folder / "whole" / "step-000006")


@pytest.mark.long
def test_checkpoints_are_loaded_by_any_layout(folder: Path) -> None:
    """Resume on ranks with equal and unequal shares, on tensor-parallel ranks of which one is
    stopped, on pipeline ranks, and on one rank."""
    run, alone = partial(_ran, folder), _alone(folder)
    (folder / "batch.plan.toml").write_text(alone + _ON_TWO)
    unequal = _ON_TWO.replace("ranks = 2\n", "ranks = 2\nshares = [3, 1]\n")
    (folder / "unequal.plan.toml").write_text(alone + unequal)
    (folder / "parts.plan.toml").write_text(alone + _PARTS)
    (folder / "stages.plan.toml").write_text(alone + _STAGES)
    here(folder, *_asked("alone.plan.toml", 8, "alone"), DROPOUT="0")
    run("batch.plan.toml", 2, "chain")
    run("unequal.plan.toml", 4, "chain", "--resume", "chain")
    # If a rank is stopped, gloo reports another error to the waiting ranks than if it has exited.
    stop = {"KILLED": "1", "SIGNAL": "SIGSTOP", "timeout": "4s"}
    said = run("parts.plan.toml", 6, "chain", "--resume", "chain", **stop)
    assert "rank 1 is stopped (SIGSTOP)" in said
    assert said.count("started again") == 1
    run("stages.plan.toml", 7, "chain", "--resume", "chain")
    here(folder, *_asked("alone.plan.toml", 8, "chain", "--resume", "chain"), DROPOUT="0")
    _agree(folder / "chain" / "step-000008", folder / "alone" / "step-000008")


@pytest.mark.long
def test_checkpoints_of_sharded_layers_and_states_are_complete(folder: Path) -> None:
    """Two pipeline stages on two tensor-parallel ranks each, and on two ranks each that shard
    the batch and states."""
    run, alone = partial(_ran, folder), _alone(folder)
    on_four = alone.replace("\nranks = 2\n", "\nranks = 4\n", 1)
    (folder / "grid.plan.toml").write_text(on_four + _PARTS + _STAGES)
    (folder / "shares.plan.toml").write_text(on_four + _ON_TWO + _SHARES + _STAGES)
    here(folder, *_asked("alone.plan.toml", 3, "of one"), DROPOUT="0")
    run("grid.plan.toml", 1, "of four")
    run("shares.plan.toml", 2, "of four", "--resume", "of four")
    run("grid.plan.toml", 3, "of four", "--resume", "of four")
    _agree(folder / "of four" / "step-000003", folder / "of one" / "step-000003")


def _alone(folder: Path) -> str:
    given = ("plan", "train.py", "--ranks", "2", "--quiet", "-o", "alone.plan.toml")
    here(folder, *given, DROPOUT="0")
    plan = folder / "alone.plan.toml"
    alone = _undecided(plan.read_text())
    plan.write_text(alone)
    return alone


def _asked(plan: str, steps: int, *arguments: str) -> tuple[str, ...]:
    every = ("--checkpoint-every", "1", "--plan", plan)
    return ("run", "train.py", "--steps", str(steps), *every, "--checkpoint", *arguments)


def _ran(
    folder: Path, plan: str, steps: int, *arguments: str, timeout: str = "60s", **environ: str
) -> str:
    given = (*_asked(plan, steps, *arguments), "--rank-timeout", timeout)
    ran = steelyard(folder, *given, DROPOUT="0", **environ)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def _agree(one: Path, other: Path) -> None:
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert ours[name].shape == expected.shape, name
        assert np.allclose(ours[name], expected, rtol=1e-4, atol=1e-6), name


def test_a_rank_with_a_different_batch_is_named(folder: Path) -> None:
    """Gradients have the same sizes, so training would continue with wrong values if nothing
    were checked."""
    odd = steelyard(folder, "run", "train.py", "--steps", "6", "--rank-timeout", "4s", ODD="1")
    assert odd.returncode == 2, odd.stderr
    said = " ".join(odd.stderr.split())
    assert "rank 1 has a different batch than the other ranks: at step 5" in said
    assert "has shape [12, 16], not [8, 16]" in said
    assert "started again" not in said


@pytest.mark.long
def test_with_sharded_states_the_rank_with_a_different_batch_is_named_too(folder: Path) -> None:
    """The rank that waits for weights is not blamed; the one with another batch is."""
    (folder / "shares.plan.toml").write_text(_alone(folder) + _ON_TWO + _SHARES)
    given = ("run", "train.py", "--steps", "6", "--plan", "shares.plan.toml")
    odd = steelyard(folder, *given, "--rank-timeout", "4s", ODD="1", DROPOUT="0")
    assert odd.returncode == 2, odd.stderr
    said = " ".join(odd.stderr.split())
    assert "rank 1 has a different batch than the other ranks: at step 5" in said
    assert "has shape [12, 16], not [8, 16]" in said
    assert "started again" not in said


def test_ctrl_c_stops_all_ranks_after_one_step_and_saves_it(folder: Path) -> None:
    arguments = (
        "run",
        "train.py",
        "--steps",
        "6",
        "--checkpoint",
        "slow",
        "--checkpoint-every",
        "1",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "steelyard", *arguments],
        cwd=folder,
        env={**os.environ, "PAUSE": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    give_up = time.monotonic() + 200
    while not (folder / "slow" / "step-000002").exists() and time.monotonic() < give_up:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    saved = sorted(path.name for path in (folder / "slow").glob("step-*"))
    assert "step-000006" not in saved
    assert f"after step {int(saved[-1][-6:])} of 6; continue with --resume slow" in said


def _family(pid: int) -> list[int]:
    """Return a process and all that it started, directly or not."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process may have ended meanwhile
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def test_two_local_ranks_listen_on_loopback_only(folder: Path) -> None:
    arguments = ("run", "train.py", "--steps", "6", "--checkpoint", "heard")
    process = subprocess.Popen(
        [sys.executable, "-m", "steelyard", *arguments, "--checkpoint-every", "1"],
        cwd=folder,
        env={**os.environ, "PAUSE": "1"},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    give_up = time.monotonic() + 200
    try:
        while not (folder / "heard" / "step-000001").exists() and time.monotonic() < give_up:
            time.sleep(0.05)
        family = _family(process.pid)
        addresses = listening(family)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    assert len(family) >= 3, "the launcher and its two ranks"
    # 127.0.0.1 in the format of /proc/net/tcp: gloo listens at no other address.
    assert addresses == {"0100007F"}


def test_a_different_number_of_ranks_is_refused(folder: Path) -> None:
    alone = steelyard(folder, "run", "train.py", RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="29500")  # fmt: skip
    assert alone.returncode == 2
    assert "the plan is for 2 ranks, but 3 were started" in alone.stderr
