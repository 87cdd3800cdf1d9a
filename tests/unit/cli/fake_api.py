"""api.py without torch: the same calls, answered at once. Not tests.

``CALLS`` lists the calls and their arguments; set ``outcome`` to raise or to wait, not to answer.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import steelyard
from steelyard.export.exported import Exported, ExportPrice
from steelyard.export.target import ExportTarget, configuration, settings_for
from steelyard.hardware.diagnosis import DoctorRow, Verdict
from steelyard.ir.metrics import Estimate
from steelyard.plans.budget import Budget
from steelyard.plans.lifetimes import StepDetail
from steelyard.plans.plan import Plan
from steelyard.plans.receipt import Receipt
from steelyard.plans.scaling_laws import Run, ScalePoint, Scaling
from steelyard.plans.trace_span import DEVICE, WAITING, Span
from tests.support.sample import DETAIL, MEASURED, MIB, PLAN

CALLS: list[tuple[str, dict[str, Any]]] = []
# The predicted peak of exported settings.
EXPORTED_MIB = 100


@dataclass
class Step:
    step: int
    steps: int
    loss: float
    seconds: float | None
    peak_bytes: int | None
    predicted_bytes: int


@dataclass
class Planned:
    plan: Plan

    def why_not(self, trade: str) -> str:
        return f"{trade} is not needed: the budget is met without it"

    def with_frontier(self) -> "Planned":
        CALLS.append(("charted", {}))
        return self

    def simulated(self) -> tuple[Span, ...]:
        CALLS.append(("simulated", {}))
        return (
            Span(rank=0, stream=DEVICE, name="aten.mm.default", where="head",
                 begin_seconds=0.0, seconds=1e-3),
            Span(rank=0, stream=WAITING, name="for all-reduce", where="data",
                 begin_seconds=1e-3, seconds=2e-3),
        )  # fmt: skip

    def detail(self) -> StepDetail:
        CALLS.append(("detail", {}))
        return DETAIL

    def exported(self, target: ExportTarget, **asked: Any) -> Exported:
        CALLS.append(("exported", {"target": target, **asked}))
        decisions = self.plan.decisions
        price = ExportPrice(
            memory_bytes=Estimate.exactly(EXPORTED_MIB * MIB), step_seconds=Estimate.exactly(2.0)
        )
        settings = settings_for(target, decisions)
        return configuration(target, decisions, settings, name=asked["name"], price=price)

    def what_if(self, memory: str) -> "Planned":
        decisions = replace(self.plan.decisions, budget=Budget(memory))
        return Planned(replace(self.plan, decisions=decisions))


class Fake(ModuleType):
    outcome: Callable[[], None] | None = None
    broadcasts: ClassVar[list[str]] = []
    measured = MEASURED

    def _asked(self, name: str, **asked: Any) -> None:
        CALLS.append((name, asked))
        if self.outcome is not None:
            self.outcome()

    def load_workload(self, train: str) -> object:
        self._asked("load_workload", train=train)
        print("printed by the user's script")
        return SimpleNamespace()

    def plan_workload(self, workload: object, *, budget: Budget, **asked: Any) -> Planned:
        self._asked("plan_workload", budget=budget, **asked)
        asked["on_progress"]("searching")
        decisions = replace(PLAN.decisions, budget=budget)
        return Planned(replace(PLAN, title=asked["title"], decisions=decisions))

    @contextlib.contextmanager
    def meeting(
        self, words: dict[str, str], *, speeds: Sequence[float] = ()
    ) -> Iterator[SimpleNamespace]:
        """Simulate the meeting of two hosts; the environment determines which of them this
        process is."""
        self._asked("meeting", words=words)

        @contextlib.contextmanager
        def with_background_load() -> Iterator[None]:
            self._asked("others at work")
            yield
            self._asked("others have ended their work")

        yield SimpleNamespace(
            is_planner=os.environ["RANK"] == "0",
            planner=0,
            num_ranks=int(os.environ["WORLD_SIZE"]),
            hosts=2,
            with_background_load=with_background_load,
            broadcast=self.broadcasts.append,
            receive=lambda: self.broadcasts[-1],
        )

    def scale_workload(self, workload: object, **asked: Any) -> Scaling:
        self._asked("scale_workload", **asked)
        run = Run(layout="d16 z1", samples=64, step_seconds=0.5, hours=2.0, usd=64.0)
        points = (ScalePoint(devices=16, same_batch=run, grown_batch=run),)
        return Scaling(title=asked["title"], cluster="declared", points=points, notes=("so",))

    def load_planned(
        self, path: Path, workload: object, *, cluster: object = None, title: str,
        on_progress: object, predict_anew: bool = False,
    ) -> Planned:  # fmt: skip
        from steelyard.plan_files.plan_file import read_decisions

        self._asked(
            "load_planned", path=path, cluster=cluster, title=title, predict_anew=predict_anew
        )
        # A plan that is predicted from decisions has no reasons of the search.
        bare = replace(PLAN, taken=(), refused=(), num_offers=0, frontier=(), next_cent=None)
        return Planned(replace(bare, decisions=read_decisions(path)))

    def run_workload(self, planned: Planned, workload: object, **asked: Any) -> Receipt:
        for step in range(1, asked["steps"] + 1):
            asked["on_step"](
                Step(
                    step=step,
                    steps=asked["steps"],
                    loss=9.0 - step / 100,
                    seconds=None if step == 2 else 1.31,
                    peak_bytes=297 * MIB if step == 2 else None,
                    predicted_bytes=296 * MIB,
                )
            )
            if step == 1:
                asked["on_note"]("the first step was taken")
            time.sleep(asked["seed"] / 1000)
        self._asked("run_workload", **asked)
        return Receipt(plan=planned.plan, measured=self.measured)

    # --- of several ranks: the first, as a process of its own, as launch() starts it --------------

    def launch(
        self, command: list[str], *, num_ranks: int, logs: Path, environ: dict[str, str],
        **asked: Any,
    ) -> SimpleNamespace:  # fmt: skip
        (logs / "run-1").mkdir()
        self._asked("launch", num_ranks=num_ranks, logs=logs, **asked)
        subprocess.run(
            [sys.executable, "-m", "tests.unit.cli.fake_api", "answer", *command[3:]],
            env={
                **os.environ,
                **environ,
                "RANK": "0",
                "WORLD_SIZE": str(num_ranks),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            check=True,
        )
        return SimpleNamespace(stopped_by="")

    def seed_everything(self, seed: int) -> None:
        self._asked("seed_everything", seed=seed)

    def keep_to_own_gpu(self) -> None:
        self._asked("keep_to_own_gpu")

    def restarts(self) -> int:
        return 0

    def as_a_rank(self, ranks: int, *, hosts: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def joined_ranks(
        self, workload: object, **asked: Any
    ) -> contextlib.AbstractContextManager[None]:
        self._asked("joined_ranks", **asked)
        return contextlib.nullcontext()

    def doctor(self, **asked: object) -> tuple[DoctorRow, ...]:
        self._asked("doctor", **asked)
        remedy = "install g++ to use --runner inductor"
        return (
            DoctorRow(name="torch", value="2.13.0+cpu"),
            DoctorRow(name="compiler", value="none", verdict=Verdict.NOTE, remedy=remedy),
        )

    def demo(self, on_line: Callable[[str], None]) -> tuple[bool, Receipt]:
        self._asked("demo")
        on_line("plain PyTorch: killed at 300 MiB")
        return True, Receipt(plan=PLAN, measured=MEASURED)


def wait_for_ever() -> None:
    print("waiting", file=sys.stderr, flush=True)
    time.sleep(60)


def install(outcome: Callable[[], None] | None = None) -> Fake:
    fake = Fake("steelyard.api")
    fake.outcome = outcome
    sys.modules["steelyard.api"] = fake
    steelyard.api = fake  # type: ignore[attr-defined]
    return fake


if __name__ == "__main__":
    # Run as ``python -m tests.unit.cli.fake_api wait|answer plan train.py ...``.
    from steelyard.cli import command

    install(wait_for_ever if sys.argv.pop(1) == "wait" else None)
    command()
