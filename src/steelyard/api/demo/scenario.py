"""``steelyard demo``: plain PyTorch runs out of memory under a limit, and a plan does not.

Starts a fresh process for each part, and compares their output. Not for what the processes do: see
worker.py.
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
from steelyard.plan_files.prediction_file import read_plan
from steelyard.plans.plan import Plan
from steelyard.plans.receipt import RankMemory, Receipt, RunMeasurement
from steelyard.units import format_bytes, format_share

OnLine = Callable[[str], None]
_MIB = 1 << 20

# Memory that kernels, threads and the meter use outside of PyTorch's allocator: 36 to 38 MiB in
# four runs without a limit (2026-11-29), 21 to 23 of them from the first step on.
_SPARE_BYTES = 48 * _MIB
# glibc's malloc keeps freed blocks for later. With these two settings, large blocks return to the
# system at once, so that a limit on the process limits its live memory. Each step then allocates
# its memory again. It does so in huge pages (glibc 2.35): otherwise page faults would take two
# fifths of a step, and their time varies by a factor of two.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
# Several threads wait for each other, so other load on the machine would disturb each step.
_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_OUT_OF_MEMORY = ("can't allocate memory", "MemoryError", "bad_alloc", "Cannot allocate memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The model, number of steps and budget of the demonstration."""

    size: Size = field(default_factory=Size)
    budget_bytes: int = 450 * _MIB
    steps: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProcessOutput:
    """The output of a process that has ended, and the last line of its error if it failed."""

    lines: tuple[Mapping[str, Any], ...]
    complaint: str

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines if "loss" in line]

    def one(self, name: str) -> Any:
        return next(line[name] for line in self.lines if name in line)


def demo(on_line: OnLine, *, scene: Scene | None = None) -> tuple[bool, Receipt]:
    """Run the demonstration; return True if it went as promised, and the receipt of the plan's
    run.
    """
    if sys.platform != "linux":
        raise BadInput(
            f"the demonstration limits a process by RLIMIT_DATA, which {sys.platform} does not "
            "enforce",
            expected="Linux",
            remedy="plan a step of your own: steelyard plan train.py --memory 2GiB",
        )
    scene = scene or Scene()
    with tempfile.TemporaryDirectory(prefix="steelyard-demo-") as folder:
        return _run_parts(_Stage(scene, Path(folder)), scene, on_line)


def _run_parts(stage: "_Stage", scene: Scene, on_line: OnLine) -> tuple[bool, Receipt]:
    size, budget = scene.size, format_bytes(scene.budget_bytes)
    on_line(f"A GPT of {size.blocks} blocks, {size.width} wide, with dropout and AdamW,")
    on_line(f"on batches of {size.samples} x {size.length} words, within {budget} of memory,")
    on_line("on one thread")
    on_line("1  the plan, made in a process without a limit")
    stage.run("plan")
    plan = stage.plan()
    for line in _plan_lines(plan):
        on_line(f"   {line}")
    on_line("2  one limit on writable memory for both (RLIMIT_DATA, enforced by the kernel)")
    with ThreadPoolExecutor(1) as executor:
        # Meanwhile, train the run that part 5 compares with; it ends before anything is timed.
        without_limit = executor.submit(stage.run, "plain", meter=True)
        base_bytes = stage.run("probe").one("held_bytes")
        limit = scene.budget_bytes + base_bytes + _SPARE_BYTES
        for amount, what in (
            (scene.budget_bytes, "the budget"),
            (base_bytes, "memory of Steelyard's process before training"),
            (_SPARE_BYTES, "allowance for kernels, threads and the memory meter"),
            (limit, "the limit"),
        ):
            on_line(f"   {format_bytes(amount):>8}  {what}")
        on_line("3  plain PyTorch under the limit")
        limited = stage.run("plain", limit_bytes=limit, may_fail=True)
        for line in _death_lines(limited, scene):
            on_line(f"   {line}")
        theirs = without_limit.result()
    on_line("4  Steelyard's plan under the limit")
    ours = stage.run("steelyard", limit_bytes=limit)
    measured = _measured(ours.one("measured"))
    on_line(f"   finished {measured.steps} steps")
    on_line("5  plain PyTorch without a limit, to compare with")
    on_line(f"   finished {len(theirs.losses)} steps; peak {_peak(theirs, plan)}")
    for line in _side_by_side(theirs.losses, ours.losses):
        on_line(f"   {line}")
    on_line("6  the receipt of the plan's run: measured and predicted")
    on_line("   (the RSS of the process also counts pages of library files, which the limit")
    on_line("   does not bound)")
    fits = measured.memory_bytes is not None and measured.memory_bytes <= scene.budget_bytes
    as_promised = bool(limited.complaint) and fits and theirs.losses == ours.losses
    return as_promised, Receipt(plan=plan, measured=measured)


class _Stage:
    """Runs one process after another on the same model, plan and table of measured costs."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self._scene = scene
        self._file = folder / "demo.plan.toml"
        # Costs measured under these malloc settings are useless for other plans.
        costs = {"STEELYARD_CACHE": str(folder / "costs.sqlite")}
        self._environment = {**os.environ, **_MALLOC, **_THREADS, **costs}

    def plan(self) -> Plan:
        plan = read_plan(self._file).plan
        assert plan is not None
        return plan

    def run(
        self, role: Role, *, limit_bytes: int = 0, meter: bool = False, may_fail: bool = False
    ) -> _ProcessOutput:
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
        lines = tuple(json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{")
        if done.returncode == 0:
            return _ProcessOutput(lines=lines, complaint="")
        complaint = _complaint(done.stderr)
        if not (may_fail and any(sign in done.stderr for sign in _OUT_OF_MEMORY)):
            raise RunFailed(
                f"a process of the demonstration failed (role {role}): {complaint}",
                expected="the process to end as the demonstration describes",
                remedy="run steelyard doctor; if it finds no problem, report this failure",
            )
        return _ProcessOutput(lines=lines, complaint=complaint)


def _complaint(stderr: str) -> str:
    """Return the last line of a traceback, without the C++ source location."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    signs = [line for line in lines if any(sign in line for sign in _OUT_OF_MEMORY)]
    line = (signs or lines or ["no message"])[-1]
    _, mark, rest = line.partition("DefaultCPUAllocator: ")
    return f"{mark}{rest.partition(' Error code')[0]}" if mark else line[:200]


def _plan_lines(plan: Plan) -> list[str]:
    metrics = plan.predicted.metrics
    more = metrics.step_seconds.value / plan.unplanned.metrics.step_seconds.value - 1
    longer = f"~{format_share(abs(more)).removeprefix('+')} {'longer' if more >= 0 else 'less'}"
    before, after = format_bytes(plan.before.peak.nbytes), format_bytes(metrics.memory_bytes.value)
    return [
        f"plain PyTorch needs ~{before}; the plan ~{after}, and takes {longer}",
        "(by recomputation only: a step split into micro-batches is exact, but not",
        "bit-identical to plain PyTorch, and the losses below are compared bit by bit)",
    ]


def _death_lines(limited: _ProcessOutput, scene: Scene) -> list[str]:
    if limited.complaint:
        wrapped = textwrap.wrap(limited.complaint, 72, initial_indent="  ", subsequent_indent="  ")
        return [f"failed in step {len(limited.losses) + 1} of {scene.steps}:", *wrapped]
    return [
        f"finished all {scene.steps} steps: this system does not enforce",
        "RLIMIT_DATA, so the demonstration shows nothing",
    ]


def _peak(theirs: _ProcessOutput, plan: Plan) -> str:
    predicted = format_bytes(plan.before.peak.nbytes)
    return f"{format_bytes(theirs.one('peak_bytes'))} (~{predicted} predicted)"


def _measured(fields: Mapping[str, Any]) -> RunMeasurement:
    ranks = tuple(RankMemory(**each) for each in fields["ranks"])
    return RunMeasurement(**{**fields, "ranks": ranks, "notes": tuple(fields["notes"])})


def _side_by_side(theirs: Sequence[float], ours: Sequence[float]) -> list[str]:
    lines = ["loss    plain PyTorch  Steelyard's plan"]
    for number, (left, right) in enumerate(zip(theirs, ours, strict=True), 1):
        same = "equal to the bit" if left == right else f"differs by {abs(left - right):.2g}"
        lines.append(f"step {number}  {left:>12.9f}  {right:>16.9f}  {same}")
    return lines
