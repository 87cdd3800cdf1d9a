"""One process of the demonstration: limits its own memory, plans or trains, prints its results.

It prints one JSON object per line on stdout. Not for comparing anything: see scenario.py.
"""

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from steelyard.api.demo.gpt import Size, workload
from steelyard.api.planned import planned
from steelyard.api.planning import load_planned
from steelyard.api.train import run_workload
from steelyard.api.workload import Workload
from steelyard.hardware.cluster import Cluster
from steelyard.measure.operators.memory import meter_once
from steelyard.planner.planner import Planner
from steelyard.planner.session import PlanRequest
from steelyard.plans.budget import Budget
from steelyard.run.rng_state import seed_everything
from steelyard.trades import TRADES

SEED = 0
# With micro-batches, dropout masks are drawn in another order; with chunked or sharded computation,
# gradients are summed in another order. Both are exact, but not bitwise equal to plain PyTorch.
_BIT_FOR_BIT = tuple(trade for trade in TRADES if trade.is_bitwise)

Role = Literal["plan", "probe", "steelyard", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of a process. A ``limit_bytes`` of 0 means no limit; ``meter`` also reports the peak
    memory.
    """

    role: Role
    plan: str
    size: Size
    budget_bytes: int
    steps: int
    limit_bytes: int = 0
    meter: bool = False

    @classmethod
    def parse(cls, text: str) -> "Task":
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "size": Size(**fields["size"])})


def main() -> None:
    task = Task.parse(sys.argv[1])
    if task.limit_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (task.limit_bytes, task.limit_bytes))
    _ROLES[task.role](task, workload(task.size))


def _plan(task: Task, work: Workload) -> None:
    request = PlanRequest(
        model=work.model,
        loss=work.loss,
        batch=work.first_batch(),
        optimizer=work.optimizer,
        cluster=Cluster.here(),
        budget=Budget(memory_bytes=task.budget_bytes),
        runner="python",
        title="demo",
        on_progress=lambda _: None,
        trades=_BIT_FOR_BIT,
    )
    planned(Planner(request.capture_and_price()), request.budget).save(task.plan)


def _probe(task: Task, work: Workload) -> None:
    """Report the memory that training with the plan needs outside of a step."""
    step = load_planned(task.plan, work).apply(work.model)
    tensors = [*step.live.model.parameters(), *step.live.model.buffers()]
    _report(held_bytes=_private_bytes() - _nbytes(tensors))


def _steelyard(task: Task, work: Workload) -> None:
    receipt = run_workload(
        load_planned(task.plan, work),
        work,
        steps=task.steps,
        seed=SEED,
        on_step=lambda report: _report(loss=report.loss),
    )
    _report(measured=asdict(receipt.measured))


def _plain(task: Task, work: Workload) -> None:
    """Run the usual training loop. The second step is metered, as in a run with a plan."""
    assert callable(work.batches)
    assert work.optimizer is not None
    optimizer = work.optimizer(work.model.parameters())
    seed_everything(SEED)
    for number, batch in zip(range(1, task.steps + 1), work.batches(), strict=False):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []

        def step(batch: Any = batch, losses: list[torch.Tensor] = losses) -> None:
            losses.append(_step(work.loss, work.model, batch, optimizer))

        if task.meter and number == 2:
            state = [t for s in optimizer.state.values() for t in s.values()]
            resident = _nbytes([*work.model.parameters(), *work.model.buffers(), *state])
            _report(
                peak_bytes=resident + _nbytes(list(batch.values())) + meter_once(step).peak_bytes
            )
        else:
            step()
        _report(loss=float(losses[0]))


def _step(
    loss: Callable[[Any, Any], torch.Tensor],
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer,
) -> torch.Tensor:
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    return value.detach()


_ROLES: dict[Role, Callable[[Task, Workload], None]] = {
    "plan": _plan,
    "probe": _probe,
    "steelyard": _steelyard,
    "plain": _plain,
}


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _private_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts: writable private memory, touched or not."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no VmData")


def _report(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
