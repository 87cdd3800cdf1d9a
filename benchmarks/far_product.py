"""A product whose weight is four times the memory budget, beside the same with all in memory.

One frozen matrix that takes 256 MiB lies in far memory, and a step that trains what comes before
and behind it has a budget of 64 MiB: its forward and its backward product read the matrix slice by
slice while they compute. The rate is that of the whole step, in wall time, planned and plain
PyTorch in turns. Arithmetic takes longer than the declared rate needs to copy the matrix: checked.

    python benchmarks/far_product.py [--threads 2] [--rate "1 GB/s"] [--folder /scratch]
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import steelyard as sy

WIDTH, ROWS, PAIRS = 8192, 384, 9
OPERAND_BYTES = WIDTH * WIDTH * 4
BUDGET_BYTES = OPERAND_BYTES // 4
LEAST_RATE = 0.8
SGD = partial(torch.optim.SGD, lr=1e-5)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(torch.tanh(self.down(x)))
        return self.out(torch.relu(self.wide(x)))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rate", default="1 GB/s")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        measure(sy.Far(folder, rate=given.rate, size="1 GiB"), given.threads)


def measure(far: sy.Far, threads: int) -> None:
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(model)
    planned = sy.plan(
        model, loss, x, optimizer=SGD, cluster=sy.Cluster.here(far=far),
        budget=sy.Budget(memory=BUDGET_BYTES),
    )  # fmt: skip
    step, optimizer = planned.apply(model), SGD(plain.parameters())

    def eager() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = loss(plain, x)
        value.backward()
        optimizer.step()
        return value.detach()

    for _ in range(3):
        drift = abs(float(step(x)) / float(eager()) - 1)
        assert drift < 1e-5, drift
    used = step.receipt().measured.memory_bytes
    ratios, plain_seconds = [], []
    for index in range(PAIRS):
        seconds = {}
        for side in (eager, partial(step, x)) if index % 2 else (partial(step, x), eager):
            start = time.perf_counter()
            side()
            seconds[side is eager] = time.perf_counter() - start
        ratios.append(seconds[True] / seconds[False])
        plain_seconds.append(seconds[True])
    ratios.sort()
    copying = 2 * OPERAND_BYTES / far.bytes_per_second
    computing = median(plain_seconds)
    print(
        f"{used / 2**20:.1f} MiB used of {BUDGET_BYTES / 2**20:.0f}, plain PyTorch "
        f"{planned.baseline.memory_bytes.value / 2**20:.0f}; plain step {computing:.3f} s, copying "
        f"at the declared rate {copying:.3f} s; {[t.label for t in planned.plan.taken]}",
        flush=True,
    )
    figures = [
        {
            "name": f"rate beside all in memory, {threads} threads",
            "value": round(median(ratios), 4),
            "interval": [round(ratios[1], 4), round(ratios[-2], 4)],
            "target": LEAST_RATE,
            "ok": median(ratios) >= LEAST_RATE and computing > copying,
        },
        {
            "name": "memory used of the budget",
            "value": round(used / BUDGET_BYTES, 4),
            "interval": None,
            "target": 1.0,
            "ok": used <= BUDGET_BYTES,
        },
    ]
    print(json.dumps({**figures[0], "ok": all(f["ok"] for f in figures), "figures": figures}))


if __name__ == "__main__":
    main()
