"""Plans a loss over a large vocabulary into a quarter of the memory that PyTorch needs for it.

The model is a projection and a head with cross-entropy. Forward and backward pass of the plan and
of eager PyTorch run in turns, in CPU time on one thread. The batch is one sequence, so that only
slices help. Memory is what the allocator holds above weights and batch, gradients included. Needs
no GPU.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import steelyard as sy
from steelyard.measure.operators.memory import meter

ROWS, WIDTH, PAIRS = 2048, 512, 5
VOCABULARIES = (32_768, 131_072)
MOST_MEMORY, MOST_TIME = 0.25, 1.05


class Head(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(hidden)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["hidden"]).flatten(0, 1), batch["words"][0])


def main() -> None:
    torch.set_num_threads(1)
    figures = [figure for words in VOCABULARIES for figure in measure(words)]
    worst = max(figures, key=lambda f: f["value"] / f["target"])
    print(
        json.dumps(
            {
                "name": f"loss head in chunks, {worst['name']}",
                "value": worst["value"],
                "interval": worst["interval"],
                "target": worst["target"],
                "ok": all(f["ok"] for f in figures),
                "figures": figures,
            }
        )
    )


def measure(words: int) -> list[dict]:
    torch.manual_seed(0)
    model = Head(words)
    plain = copy.deepcopy(model)
    batch = {"hidden": torch.randn(1, ROWS, WIDTH), "words": torch.randint(words, (1, ROWS))}
    held = sum(t.nbytes for t in (*model.parameters(), *batch.values()))

    def eager() -> None:
        plain.zero_grad(set_to_none=True)
        loss(plain, batch).backward()

    before = meter(eager).peak_bytes
    budget = sy.Budget(memory=held + int(MOST_MEMORY * before))
    planned = sy.plan(model, loss, batch, budget=budget)
    step = planned.apply(model)

    def ours() -> None:
        model.zero_grad(set_to_none=True)
        step.backward(batch)

    eager()
    ours()
    worst = max(
        float((p.grad - q.grad).abs().max() / q.grad.abs().max())
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert worst < 1e-5, worst
    model.zero_grad(set_to_none=True)
    after = meter(ours).peak_bytes
    predicted = planned.predicted.memory_bytes.value - held
    ratios = []
    for index in range(PAIRS):
        seconds = {}
        for side in (eager, ours) if index % 2 else (ours, eager):
            start = time.process_time()
            side()
            seconds[side] = time.process_time() - start
        ratios.append(seconds[ours] / seconds[eager])
    ratios.sort()
    print(
        f"{words} words: {after / 2**20:.0f} of {before / 2**20:.0f} MiB ({predicted / 2**20:.0f} "
        f"predicted), {median(ratios):.3f} of the time, gradients within {worst:.1e}; "
        f"{[t.label for t in planned.plan.taken]}",
        flush=True,
    )
    name = f"{words // 1024}k words"
    return [
        {
            "name": f"{name}: peak beside plain PyTorch",
            "value": round(after / before, 4),
            "interval": None,
            "target": MOST_MEMORY,
            "ok": after <= MOST_MEMORY * before,
        },
        {
            "name": f"{name}: CPU time beside plain PyTorch",
            "value": round(median(ratios), 4),
            "interval": [round(ratios[1], 4), round(ratios[-2], 4)],
            "target": MOST_TIME,
            "ok": median(ratios) <= MOST_TIME,
        },
    ]


if __name__ == "__main__":
    main()
