"""``steelyard demo``: plain PyTorch dies under a memory limit, a plan finishes under the same one.

Starts the processes, each fresh, and compares what they tell. Not for what runs in them: worker.py.
"""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from steelyard.api.demo.gpt import Size
from steelyard.api.demo.worker import Role, Task
from steelyard.errors import BadInput, RunFailed
from steelyard.plans.plan import Plan
from steelyard.plans.prediction_file import read_plan
from steelyard.plans.receipt import RankMemory, Receipt, RunMeasurement
from steelyard.units import format_bytes, format_share

OnLine = Callable[[str], None]
_MIB = 1 << 20

# What kernels, threads and the meter hold outside of PyTorch's allocator while they run.
_SPARE_BYTES = 32 * _MIB
# glibc's malloc keeps freed blocks for later: by these two settings large ones go back to the
# system at once, so that a limit on the process is a limit on what is alive in it. Each step then
# fetches its memory anew: in huge pages (glibc 2.35), or two fifths of a step are page faults,
# which take twice as long at one time as at another.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
# Several threads wait for each other: whatever else the machine does would show in each step.
_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_OUT_OF_MEMORY = ("can't allocate memory", "MemoryError", "bad_alloc", "Cannot allocate memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is trained, for how long, and within which budget."""

    size: Size = field(default_factory=Size)
    budget_bytes: int = 450 * _MIB
    steps: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """How a process ended: what it told, and the last line of its complaint if it failed."""

    told: tuple[Mapping[str, Any], ...]
    complaint: str

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.told if "loss" in line]

    def one(self, name: str) -> Any:
        return next(line[name] for line in self.told if name in line)


def demo(on_line: OnLine, *, scene: Scene | None = None) -> tuple[bool, Receipt]:
    """Whether it went as promised, and the receipt of the run by the plan."""
    if sys.platform != "linux":
        raise BadInput(
            f"the demonstration limits a process by RLIMIT_DATA, which {sys.platform} does not",
            expected="Linux",
            remedy="plan a step of your own: steelyard plan train.py --memory 2GiB",
        )
    scene = scene or Scene()
    with tempfile.TemporaryDirectory(prefix="steelyard-demo-") as folder:
        return _told(_Stage(scene, Path(folder)), scene, on_line)


def _told(stage: "_Stage", scene: Scene, on_line: OnLine) -> tuple[bool, Receipt]:
    size, budget = scene.size, format_bytes(scene.budget_bytes)
    on_line(f"A GPT of {size.blocks} blocks, {size.width} wide, with dropout and AdamW,")
    on_line(f"on batches of {size.samples} x {size.length} words, within {budget} of memory,")
    on_line("on one thread")
    on_line("1  the plan, made in a process without a limit")
    stage.run("plan")
    plan = stage.plan()
    for line in _planned(plan):
        on_line(f"   {line}")
    on_line("2  one limit for both (RLIMIT_DATA: the kernel gives no memory beyond it)")
    with ThreadPoolExecutor(1) as beside:
        # What 5 compares with is trained meanwhile: it has ended before anything is timed.
        without_limit = beside.submit(stage.run, "plain", meter=True)
        held = stage.run("probe").one("held_bytes")
        limit = scene.budget_bytes + held + _SPARE_BYTES
        for amount, what in (
            (scene.budget_bytes, "the budget"),
            (held, "what Steelyard's process holds before it trains"),
            (_SPARE_BYTES, "for kernels, threads and the meter"),
            (limit, "the limit"),
        ):
            on_line(f"   {format_bytes(amount):>8}  {what}")
        on_line("3  plain PyTorch under the limit")
        died = stage.run("plain", limit_bytes=limit, may_fail=True)
        for line in _death(died, scene):
            on_line(f"   {line}")
        theirs = without_limit.result()
    on_line("4  Steelyard's plan under the limit")
    ours = stage.run("steelyard", limit_bytes=limit)
    measured = _measured(ours.one("measured"))
    on_line(f"   finished {measured.steps} steps")
    on_line("5  plain PyTorch without a limit, to compare with")
    on_line(f"   finished {len(theirs.losses)} steps, and held {_peak(theirs, plan)}")
    for line in _side_by_side(theirs.losses, ours.losses):
        on_line(f"   {line}")
    on_line("6  the receipt of the plan's run: measured beside predicted")
    kept = measured.memory_bytes is not None and measured.memory_bytes <= scene.budget_bytes
    as_promised = bool(died.complaint) and kept and theirs.losses == ours.losses
    return as_promised, Receipt(plan=plan, measured=measured)


class _Stage:
    """Runs one process after another on the same model, plan and list of measured costs."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self._scene = scene
        self._file = folder / "demo.plan.toml"
        # Costs measured under these malloc settings are no use to anybody else's plans.
        costs = {"STEELYARD_CACHE": str(folder / "costs.sqlite")}
        self._environment = {**os.environ, **_MALLOC, **_THREADS, **costs}

    def plan(self) -> Plan:
        plan = read_plan(self._file).plan
        assert plan is not None
        return plan

    def run(
        self, role: Role, *, limit_bytes: int = 0, meter: bool = False, may_fail: bool = False
    ) -> _Ended:
        task = Task(
            role=role,
            plan=str(self._file),
            size=self._scene.size,
            budget_bytes=self._scene.budget_bytes,
            steps=self._scene.steps,
            limit_bytes=limit_bytes,
            meter=meter,
        )
        done = subprocess.run(
            [sys.executable, "-m", "steelyard.api.demo.worker", json.dumps(asdict(task))],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        told = tuple(json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{")
        if done.returncode == 0:
            return _Ended(told=told, complaint="")
        complaint = _complaint(done.stderr)
        if not (may_fail and any(sign in done.stderr for sign in _OUT_OF_MEMORY)):
            raise RunFailed(
                f"a process of the demonstration failed (role {role}): {complaint}",
                expected="it to end as the demonstration tells",
                remedy="see what is in its way with steelyard doctor, and report it if nothing is",
            )
        return _Ended(told=told, complaint=complaint)


def _complaint(stderr: str) -> str:
    """The last line of a traceback, without the place in C++ where it was raised."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    signs = [line for line in lines if any(sign in line for sign in _OUT_OF_MEMORY)]
    said = (signs or lines or ["no word"])[-1]
    _, mark, rest = said.partition("DefaultCPUAllocator: ")
    return f"{mark}{rest.partition(' Error code')[0]}" if mark else said[:200]


def _planned(plan: Plan) -> list[str]:
    metrics = plan.predicted.metrics
    more = metrics.step_seconds.value / plan.unplanned.metrics.step_seconds.value - 1
    before, after = format_bytes(plan.before.peak.nbytes), format_bytes(metrics.memory_bytes.value)
    return [
        f"plain PyTorch needs ~{before}; the plan ~{after}, for ~{format_share(more)} time",
        "(by recomputing alone: cut into micro-batches, a step is exact but not",
        "bit for bit plain PyTorch's, and bits are what is compared below)",
    ]


def _death(died: _Ended, scene: Scene) -> list[str]:
    if died.complaint:
        said = textwrap.wrap(died.complaint, 72, initial_indent="  ", subsequent_indent="  ")
        return [f"died in step {len(died.losses) + 1} of {scene.steps}:", *said]
    return [
        f"finished all {scene.steps} steps: this system does not hold processes to",
        "RLIMIT_DATA, so that the demonstration shows nothing",
    ]


def _peak(theirs: _Ended, plan: Plan) -> str:
    predicted = format_bytes(plan.before.peak.nbytes)
    return f"{format_bytes(theirs.one('peak_bytes'))} (~{predicted} predicted)"


def _measured(told: Mapping[str, Any]) -> RunMeasurement:
    ranks = tuple(RankMemory(**each) for each in told["ranks"])
    return RunMeasurement(**{**told, "ranks": ranks, "notes": tuple(told["notes"])})


def _side_by_side(theirs: Sequence[float], ours: Sequence[float]) -> list[str]:
    lines = ["loss    plain PyTorch  Steelyard's plan"]
    for number, (left, right) in enumerate(zip(theirs, ours, strict=True), 1):
        same = "equal to the bit" if left == right else f"differs by {abs(left - right):.2g}"
        lines.append(f"step {number}  {left:>12.9f}  {right:>16.9f}  {same}")
    return lines
