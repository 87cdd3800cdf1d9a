"""Compares a step on two gloo ranks with DistributedDataParallel and with FSDP2.

    python benchmarks/ranks.py [link ...] [model ...]

All sides train the same model on the same batches in the same processes, one step each in turn. A
step takes as long as its slowest rank. The figure is the median of the paired ratios, with its 95
% interval. Our generated Python is compared with the better of DistributedDataParallel's default
and tuned buckets, and our Inductor runner with torch.compile around DistributedDataParallel. FSDP2
shards block by block. Our plan is the fastest one of the search for two ranks, even where one rank
would be faster; against FSDP2, it is the fastest plan with sharded states that is predicted to
hold no more memory than FSDP2 was metered to. Each model runs in fresh processes. Peaks are what
the allocator adds in a step, gradients included, and what remains after one without them. Links
are a loopback, and 1 Gbit/s between hosts (see hosts.py), measured before planning. Needs two idle
cores, and root for hosts.
"""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._linked import know_link, run_on
from benchmarks._turns import in_turn
from benchmarks.hosts import hosts
from benchmarks.runner import interval

LINKS = {"loopback": None, "1 Gbit/s": 10**9}
RANKS, PAIRS, WARM_UP, SAME_STEPS = 2, 30, 3, 3
METERED = 5
TIME_TARGET, PEAK_TARGET, SAME = 1.0, 1.0, 1e-3
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3)
BUCKETS_MB = (1, 4, 25, 100)
Step = Callable[[], Tensor]


def main() -> None:
    names = sys.argv[1:] or sorted(MODELS)
    links = [link for link in LINKS if link in names] or list(LINKS)
    models = [name for name in names if name not in LINKS] or sorted(MODELS)
    figures = [figure for link in links for name in models for figure in measured(name, link)]
    for figure in figures:
        print(json.dumps(figure), flush=True)
    worst = max(figures, key=lambda f: f["value"])
    print(
        json.dumps(
            {
                "name": "ranks: a step on two ranks / the best of DDP, or FSDP2",
                "value": worst["value"],
                "interval": worst["interval"],
                "target": worst["target"],
                "ok": all(f["ok"] for f in figures),
                "figures": figures,
            }
        )
    )


def measured(name: str, link: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        commands = [[__file__, "--rank", str(rank), name, temporary] for rank in range(RANKS)]
        if LINKS[link] is None:
            _run_here(name, commands)
        else:
            os.environ["STEELYARD_CACHE"] = f"{temporary}/costs.sqlite"
            (folder / "link").mkdir()
            with hosts(RANKS, bits_per_second=LINKS[link]) as pair:
                know_link(pair, folder / "link", ranks=RANKS)
                run_on(pair, folder, commands)
        found: list[dict[str, Any]] = json.loads((folder / "found.json").read_text())
        return [{**figure, "name": f"{link}, {figure['name']}"} for figure in found]


def _run_here(name: str, commands: Sequence[Sequence[str]]) -> None:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, *own], env=environ) for own in commands]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"{name}: ranks ended with {codes}")


# --- one rank -------------------------------------------------------------------------------------


def work(rank: int, name: str, folder: Path) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    torch.manual_seed(0)
    model, loss, batch = MODELS[name]()
    found = _beside_ddp(name, model, loss, batch, rank, folder)
    found += _beside_fsdp(name, model, loss, batch, rank, folder)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _beside_ddp(
    name: str, model: nn.Module, loss: Any, batch: Any, rank: int, folder: Path
) -> list[dict[str, Any]]:
    ours = _ours(model, loss, batch, rank, folder / "batch.plan.toml", states=False)
    compiled = _ours(
        model, loss, batch, rank, folder / "compiled.plan.toml", states=False, runner="inductor"
    )
    sides: dict[str, Step] = {"ours": lambda: ours(batch), "compiled": lambda: compiled(batch)}
    sides["stock"] = _ddp(model, loss, batch, rank)
    for size in BUCKETS_MB:
        sides[f"{size} MB"] = _ddp(
            model, loss, batch, rank, bucket_cap_mb=size, gradient_as_bucket_view=True
        )
    sides["torch.compile"] = _ddp(model, loss, batch, rank, compiled=True)
    _same(sides)
    seconds = in_turn(sides, PAIRS, warm_up=WARM_UP)
    plain = (side for side in sides if side not in ("ours", "compiled", "torch.compile"))
    best = min(plain, key=lambda side: median(seconds[side]))
    return [
        _ratio(f"{name}: seconds / DDP ({best})", seconds["ours"], seconds[best]),
        _ratio(
            f"{name}, compiled: seconds / torch.compile(DDP)",
            seconds["compiled"],
            seconds["torch.compile"],
        ),
    ]


def _beside_fsdp(
    name: str, model: nn.Module, loss: Any, batch: Any, rank: int, folder: Path
) -> list[dict[str, Any]]:
    limit = _fsdp_bytes(model, loss, batch, rank)
    theirs, sharded, optimizer = _fsdp(model, loss, batch, rank)
    ours = _ours(model, loss, batch, rank, folder / "states.plan.toml", states=True, limit=limit)
    sides: dict[str, Step] = {"ours": lambda: ours(batch), "fsdp2": theirs}
    _same(sides)
    peaks = {
        "ours": _peak(sides["ours"]) + _held(ours.live.model, ours.live.optimizer),
        "fsdp2": _peak(theirs) + _held(sharded, optimizer),
    }
    seconds = in_turn(sides, PAIRS, warm_up=WARM_UP)
    ratio = peaks["ours"] / peaks["fsdp2"]
    return [
        _ratio(f"{name}: seconds / FSDP2", seconds["ours"], seconds["fsdp2"]),
        {
            "name": f"{name}: peak / FSDP2",
            "value": round(ratio, 3),
            "interval": None,
            "target": PEAK_TARGET,
            "ok": ratio <= PEAK_TARGET,
            "peaks": peaks,
        },
    ]


def _ours(
    model: nn.Module,
    loss: Any,
    batch: Any,
    rank: int,
    path: Path,
    *,
    states: bool,
    limit: float = math.inf,
    runner: Literal["python", "inductor"] = "python",
) -> Any:
    """Return our step: the fastest plan on two ranks that fits ``limit``, else the leanest one.

    Rank 0 makes the plan, and both ranks read it.
    """
    import steelyard as sy
    from steelyard.ir.parallel_layout import ParallelLayout
    from steelyard.plan_files.plan_file import write_decisions
    from steelyard.planner.session import PlanRequest
    from steelyard.plans.budget import Budget
    from steelyard.plans.plan import Decisions

    model = copy.deepcopy(model)
    if rank == 0:
        # Plan on all cores, as before the ranks are started: the link was measured with a core for
        # each rank. A rank that plans on its own core would measure a link of two ranks on it.
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        session = PlanRequest(
            model=model, loss=loss, batch=batch, optimizer=OPTIMIZER, budget=Budget(),
            cluster=sy.Cluster.here(ranks=RANKS), runner=runner, title="",
            on_progress=lambda _: None,
        ).capture_and_price()  # fmt: skip
        ways = [
            way
            for way in session.layouts.candidates.of(ParallelLayout(data=RANKS))
            if any(rule.trade == "shard_states" for rule in way.rules) == states
        ]
        leanest = min(way.nbytes for way in ways)
        ways = [way for way in ways if way.nbytes <= max(limit, leanest)]
        way = min(ways, key=lambda way: (way.seconds, way.nbytes))
        write_decisions(path, Decisions(target=session.target(), budget=Budget(), rules=way.rules))
        os.sched_setaffinity(0, own)
    dist.barrier()
    planned = sy.load(path, model, loss, batch, optimizer=OPTIMIZER)
    dist.barrier()
    return planned.apply()


def _ddp(
    model: nn.Module, loss: Any, batch: Any, rank: int, *, compiled: bool = False, **settings: Any
) -> Step:
    own: Any = nn.parallel.DistributedDataParallel(copy.deepcopy(model), **settings)
    own = torch.compile(own) if compiled else own
    return _trained(own, own.parameters(), loss, batch, rank)[0]


def _fsdp(model: nn.Module, loss: Any, batch: Any, rank: int) -> tuple[Step, nn.Module, Any]:
    from torch.distributed.fsdp import fully_shard

    own = copy.deepcopy(model)
    for block in own.blocks:
        fully_shard(block)
    fully_shard(own)
    step, optimizer = _trained(own, own.parameters(), loss, batch, rank)
    return step, own, optimizer


def _fsdp_bytes(model: nn.Module, loss: Any, batch: Any, rank: int) -> int:
    """Return the peak memory of a rank, with its share of the batch, as predictions count it."""
    step, sharded, optimizer = _fsdp(model, loss, batch, rank)
    step()
    peak_bytes = _peak(step) + _held(sharded, optimizer)
    return peak_bytes + sum(x.nbytes for x in batch.values()) // RANKS


def _trained(
    own: nn.Module, parameters: Any, loss: Any, batch: Any, rank: int
) -> tuple[Step, torch.optim.Optimizer]:
    optimizer = OPTIMIZER(parameters)
    share = {key: x.chunk(RANKS)[rank].contiguous() for key, x in batch.items()}

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        value: Tensor = loss(own, share)
        value.backward()
        optimizer.step()
        return value.detach()

    return step, optimizer


def _same(sides: dict[str, Step]) -> None:
    """Assert that all sides compute the same losses as our step."""
    for _ in range(SAME_STEPS):
        losses = {}
        for side, step in sides.items():
            value = step().clone()
            if side not in ("ours", "compiled"):  # their loss is of a rank's share
                dist.all_reduce(value)
                value /= RANKS
            losses[side] = float(value)
        first = losses["ours"]
        assert all(abs(x - first) <= SAME * abs(first) for x in losses.values()), losses


def _ratio(name: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    low, value, high = interval([a / b for a, b in zip(ours, theirs, strict=True)])
    return {
        "name": name,
        "value": round(value, 3),
        "interval": [round(low, 3), round(high, 3)],
        "target": TIME_TARGET,
        # Our step is no slower if the interval reaches down to the target.
        "ok": low <= TIME_TARGET,
        "seconds": [round(median(ours), 4), round(median(theirs), 4)],
    }


def _peak(step: Step) -> int:
    """Return the peak memory of a step, the least of a few.

    The meter does not see what gloo's threads free, and keeps counting it.
    """
    from steelyard.measure.operators.memory import meter

    return min(meter(step).peak_bytes for _ in range(METERED))


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of this rank's shards of weights and optimizer state.

    Gradients are left out: each step frees those of the step before, and the peak counts its own.
    """
    kept = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    local = (getattr(x, "to_local", lambda x=x: x)() for x in (*model.parameters(), *kept))
    return sum(x.nbytes for x in local)


# --- the models -----------------------------------------------------------------------------------


def _gpt(layers: int, width: int, vocabulary: int, batch: int, length: int) -> Any:
    from tests.zoo.case import next_token_loss, tokens
    from tests.zoo.own import GPT

    model = GPT(
        layers=layers, width=width, heads=4, vocabulary=vocabulary, length=length, dropout=0.0,
        fused=True,
    )  # fmt: skip
    return model, next_token_loss, tokens(batch, length, vocabulary)


class Perceptron(nn.Module):
    """A model with many weights and little computation for each."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x


def _squares(model: nn.Module, batch: Any) -> Tensor:
    result: Tensor = (model(batch["x"]) - batch["y"]).square().mean()
    return result


def _perceptron() -> Any:
    x, y = torch.randn(2, 256, 1024)
    return Perceptron(6, 1024), _squares, {"x": x, "y": y}


MODELS: dict[str, Callable[[], Any]] = {
    "gpt": partial(_gpt, 4, 256, 2048, 8, 128),
    "small gpt": partial(_gpt, 4, 64, 512, 8, 64),
    "perceptron": _perceptron,
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    else:
        main()
