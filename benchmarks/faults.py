"""Breaks ranks of ``steelyard run`` in many ways, and checks the diagnosis and its delay.

    python benchmarks/faults.py [case ...]

Two ranks train a small model. In the fifth step one of them is killed, stopped, starved of memory,
or given other data than its peer; in other cases the ranks are started with wrong settings. Each
fault must be refused before training, or diagnosed within the time that ranks wait for each other
plus 5 s: the right rank and cause, no process left, and one restart only where it helps. The
figure is the largest number of seconds beyond that time. Not for the speed of ranks: see ranks.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS, GRACE_SECONDS, GIVE_UP_SECONDS = 6.0, 5.0, 150
CULPRIT, BREAKS_AT, STEPS = 1, 4, 6
OK, BAD_INPUT, RUN_FAILED = 0, 2, 4
_RUN = ("run", "train.py", "--steps", str(STEPS), "--rank-timeout", f"{TIMEOUT_SECONDS:g}s",
        "--checkpoint", "saved", "--checkpoint-every", "1")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault and its expected outcome.

    ``says`` is a pattern that the command's stderr must match. ``code`` is the exit code, and
    ``restarts`` the number of restarts before it. With ``by_hand``, the ranks are started one by
    one without our launcher, each with its own arguments, and each must match the pattern.
    """

    says: str
    code: int
    restarts: int = 0
    command: Sequence[str] = _RUN
    by_hand: tuple[Sequence[str], ...] = ()
    environ: dict[str, str] = field(default_factory=dict)


def _planned_by(path: str) -> tuple[str, ...]:
    return (*_RUN, "--plan", path)


_PLAN = ("plan", "train.py", "--quiet", "-o", "other.plan.toml", "--cluster")
FAULTS = {
    "killed": Fault(says="rank 1 was killed", code=OK, restarts=1),
    "killed, and again": Fault(says=r"rank 1 was killed \(SIGKILL\)", code=RUN_FAILED, restarts=1),
    "stopped": Fault(says=r"rank 1 is stopped \(SIGSTOP\)", code=OK, restarts=1),
    "out of memory": Fault(says=r"rank 1 failed.*out of memory", code=RUN_FAILED),
    "raises in its data": Fault(says="rank 1 failed at .*LookupError: no such", code=RUN_FAILED),
    "raises in its model": Fault(says="on rank 1: .*LookupError: no such", code=BAD_INPUT),
    "another model": Fault(says="rank 1 differs from rank 0 in the parameters", code=BAD_INPUT),
    "another batch at first": Fault(says="rank 1 differs from rank 0 in the batch", code=BAD_INPUT),
    "other values at first": Fault(says="rank 1 differs.*values of the first", code=BAD_INPUT),
    "another batch later": Fault(says="rank 1 .*batches of the same shapes", code=BAD_INPUT),
    **{
        f"{case}, in slots": Fault(
            says=says, code=code, restarts=restarts, command=_planned_by("slots.plan.toml"),
            environ={"FAULT": case},
        )
        for case, says, code, restarts in (
            ("killed", "rank 1 was killed", OK, 1),
            ("stopped", r"rank 1 is stopped \(SIGSTOP\)", OK, 1),
            ("out of memory", r"rank 1 failed.*out of memory", RUN_FAILED, 0),
            ("another batch later", "rank 1 .*batches of the same shapes", BAD_INPUT, 0),
        )
    },
    "another plan": Fault(
        says="rank 1 differs from rank 0 in the plan", code=BAD_INPUT,
        by_hand=(_planned_by("train.plan.toml"), _planned_by("small.plan.toml")),
    ),
    "another torch": Fault(says="rank 1 differs from rank 0 in the torch", code=BAD_INPUT),
    "four planned, two started": Fault(
        says="the plan is for 4 ranks, but 2 were started", code=BAD_INPUT,
        by_hand=(_planned_by("four.plan.toml"),) * 2,
    ),
    "a batch that does not divide": Fault(
        says="shares the batch among 2 ranks expected: one of 1, 7 equal", code=BAD_INPUT,
        environ={"BATCH": "7"},
    ),
    "more ranks than samples": Fault(
        says="shares the batch among 2 ranks expected: one of 1 equal", code=BAD_INPUT,
        environ={"BATCH": "1"},
    ),
    "a cluster with a loop": Fault(
        says="contains itself: node > rack > node", code=BAD_INPUT, command=(*_PLAN, "loop.toml")
    ),
    "a cluster without a link": Fault(
        says="link is missing: ", code=BAD_INPUT, command=(*_PLAN, "unlinked.toml")
    ),
}  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _prepare(folder)
        found = [_tried(case, folder) for case in sys.argv[1:] or FAULTS]
    worst = max(each["seconds_over"] for each in found)
    right = sum(each["ok"] for each in found)
    print(
        json.dumps(
            {
                "name": "faults: seconds to a diagnosis beyond the time that ranks wait",
                "value": round(worst, 2),
                "interval": None,
                "target": GRACE_SECONDS,
                "ok": right == len(found) and worst <= GRACE_SECONDS,
                "cases": len(found),
                "right": right,
                "figures": [
                    {**each, "value": each["seconds_over"], "target": GRACE_SECONDS}
                    for each in found
                ],
            }
        )
    )


def _tried(case: str, folder: Path) -> dict[str, Any]:
    fault, mark = FAULTS[case], uuid.uuid4().hex
    for old in (*folder.glob("saved/step-*/*"), folder / "applied"):
        old.unlink(missing_ok=True)
    for old in folder.glob("saved/step-*"):
        old.rmdir()
    environ = {**os.environ, "FAULT": case, **fault.environ, "MARK": mark}
    begin = time.time()
    if fault.by_hand:
        places = [{**environ, **place} for place in _places(len(fault.by_hand))]
        started = [_Started(a, folder, e) for a, e in zip(fault.by_hand, places, strict=True)]
    else:
        started = [_Started(fault.command, folder, environ)]
    codes = [process.ended() for process in started]
    applied = folder / "applied"
    since = float(applied.read_text()) if applied.exists() else 0.0
    said = [process.first_said(fault.says) for process in started]
    over = max(at - since - TIMEOUT_SECONDS if at and since else 0.0 for at in said)
    restarts = sum(process.text().count("started again") for process in started)
    wrong = {
        "ended with": codes if any(code != fault.code for code in codes) else None,
        "never said it": None if all(said) else [process.text()[-600:] for process in started],
        "restarts": restarts if restarts != fault.restarts else None,
        "left": _left(mark) or None,
        "too late": round(over, 2) if over > GRACE_SECONDS else None,
    }
    wrong = {what: found for what, found in wrong.items() if found is not None}
    figure = {
        "name": case,
        "seconds_over": round(max(over, 0.0), 2),
        # If the input is refused: from the command to the message. Most of it is imports.
        "seconds": round(max(said) - (since or begin), 2) if all(said) else None,
        "ok": not wrong,
        **({"wrong": wrong} if wrong else {}),
    }
    print(json.dumps(figure), file=sys.stderr, flush=True)
    return figure


class _Started:
    """A command, with the time of each line that it writes to stderr."""

    def __init__(self, arguments: Sequence[str], folder: Path, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "steelyard", *arguments],
            cwd=folder, env=environ, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append((time.time(), line))

    def ended(self) -> int | str:
        try:
            code: int | str = self._process.wait(timeout=GIVE_UP_SECONDS)
        except subprocess.TimeoutExpired:
            # The kernel kills the ranks when their launcher ends.
            self._process.kill()
            self._process.wait()
            code = "never"
        self._reader.join(timeout=GRACE_SECONDS)
        return code

    def text(self) -> str:
        return " ".join(" ".join(line for _, line in self._lines).split())

    def first_said(self, words: str) -> float:
        """Return the time at which the output first matched the pattern; 0.0 if it never did.

        Line breaks within a match are ignored.
        """
        text = ""
        for at, line in self._lines:
            text = f"{text} {' '.join(line.split())}"
            if re.search(words, text):
                return at
        return 0.0


def _places(count: int) -> list[dict[str, str]]:
    """Return the environment of each rank, as torchrun would set it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    return [{**meet, "RANK": str(rank), "WORLD_SIZE": str(count)} for rank in range(count)]


def _left(mark: str) -> list[str]:
    """Return all processes with the mark in their environment; the command may have ended."""
    time.sleep(1.0)
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (place / "environ").read_bytes():
                found.append(f"{place.name} {(place / 'comm').read_text().strip()}")
    return found


# --- the training script and the clusters ---------------------------------------------------------

_SCRIPT = f'''
import os, resource, signal, time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import steelyard as sy

FAULT = os.environ.get("FAULT", "")
IS_CULPRIT = os.environ.get("RANK") == "{CULPRIT}"
IS_FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
BATCH = int(os.environ.get("BATCH", "8"))

if FAULT == "another torch" and IS_CULPRIT:
    torch.__version__ = "2.12.1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        width = 48 if FAULT == "another model" and IS_CULPRIT else 32
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        if FAULT == "raises in its model" and IS_CULPRIT:
            raise LookupError("no such expert")
        return self.down(nn.functional.gelu(self.up(x)))


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def apply():
    if not Path("applied").exists():  # else it is another try
        Path("applied").write_text(str(time.time()))
    match FAULT:
        case "killed" if IS_FIRST:
            os.kill(os.getpid(), signal.SIGKILL)
        case "killed, and again":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped" if IS_FIRST:
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raises in its data":
            raise LookupError("no such sample")
        case "out of memory":
            used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_DATA, (used + 2**24, used + 2**24))
            return torch.ones(2**26)
        case "another batch later":
            return 12
    return None


def batches():
    generator = torch.Generator().manual_seed(3)
    for step in range({STEPS}):
        found = apply() if step == {BREAKS_AT} and IS_CULPRIT else None
        count = found if isinstance(found, int) else BATCH
        if FAULT == "another batch at first" and IS_CULPRIT:
            count = 12
        x, y = torch.randn(2, count, 16, generator=generator)
        if FAULT == "other values at first" and IS_CULPRIT:
            x = x + 1
        yield {{"x": x, "y": y}}


def workload():
    torch.manual_seed(2)
    return sy.Workload(Net(), loss, batches, partial(torch.optim.AdamW, lr=1e-2))
'''
_ON_RANKS = """
[[overlap]]
window = 1

[[shard_batch]]
ranks = {ranks}
bucket = "{bucket}"
"""
_CLUSTER = """
[device.mine]
memory = "8 GiB"
memory_bandwidth = "100 GB/s"
peak = {{ float32 = "1 TFLOP/s" }}
[link.wire]
rate = "1 GB/s"
latency = "10 us"
[scope.node]
members = {{ {member} = 2 }}
{link}
[scope.rack]
members = {{ node = 2 }}
link = "wire"
"""


def _prepare(folder: Path) -> None:
    """Write the training script, its plans for two and for four ranks, and the clusters."""
    (folder / "train.py").write_text(_SCRIPT)
    for ranks, bucket, name in (
        (2, "64 KiB", "train"),
        (2, "1 KiB", "small"),
        (4, "64 KiB", "four"),
    ):
        plan = folder / f"{name}.plan.toml"
        given = ("plan", "train.py", "--ranks", str(ranks), "--quiet", "-o", plan.name)
        subprocess.run(
            [sys.executable, "-m", "steelyard", *given],
            cwd=folder, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        if "[[shard_batch]]" not in plan.read_text():  # the planner chose one rank
            plan.write_text(plan.read_text() + _ON_RANKS.format(ranks=ranks, bucket=bucket))
    said = (folder / "train.plan.toml").read_text()
    if "[[shared_memory_transfer]]" not in said:
        said += '\n[[shared_memory_transfer]]\nmessages = "exchanges"\n'
    (folder / "slots.plan.toml").write_text(said)
    loop = _CLUSTER.format(member="rack", link='link = "wire"')
    (folder / "loop.toml").write_text(loop)
    (folder / "unlinked.toml").write_text(_CLUSTER.format(member="mine", link=""))


if __name__ == "__main__":
    main()
