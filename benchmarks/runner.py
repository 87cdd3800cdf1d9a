"""Compares generated Python with eager PyTorch: forward and backward of a GPT, in CPU time.

Both sides run in turns in one process on one thread. The figure is the median of the paired
ratios, with its 95 % interval. The first lines compare a step with itself. Needs no GPU.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.live import live
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

PAIRS, WARM_UP = 60, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    name: str
    target: float
    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    batch: int


SETTINGS = (
    Setting(name="small GPT", target=1.15, layers=4, width=128, heads=4, length=128,
            vocabulary=512, batch=8),
    Setting(name="GPT, operators dominate", target=1.05, layers=12, width=256, heads=8, length=256,
            vocabulary=2048, batch=4),
)  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    figures = [measure(setting) for setting in SETTINGS]
    worst = max(figures, key=lambda f: f["interval"][1] / f["target"])
    print(
        json.dumps(
            {
                "name": "runner: generated Python / eager, CPU time",
                "value": worst["value"],
                "interval": worst["interval"],
                "target": worst["target"],
                "ok": all(f["ok"] for f in figures),
                "figures": figures,
            }
        )
    )


def measure(setting: Setting) -> dict:
    torch.manual_seed(0)
    model = GPT(
        layers=setting.layers,
        width=setting.width,
        heads=setting.heads,
        vocabulary=setting.vocabulary,
        length=setting.length,
    )
    plain = copy.deepcopy(model)
    batch = tokens(setting.batch, setting.length, setting.vocabulary)
    step = live(model, next_token_loss, batch)

    def eager() -> None:
        plain.zero_grad(set_to_none=True)
        next_token_loss(plain, batch).backward()

    def ours() -> None:
        model.zero_grad(set_to_none=True)
        step.backward(batch)

    same(setting, model, plain, ours, eager)
    noise = paired(eager, eager, PAIRS // 3)
    low, value, high = paired(ours, eager, PAIRS)
    print(
        f"{setting.name}: {value:.3f} [{low:.3f}, {high:.3f}], target {setting.target}; "
        f"eager beside itself {noise[1]:.3f} [{noise[0]:.3f}, {noise[2]:.3f}]",
        flush=True,
    )
    return {
        "name": setting.name,
        "value": round(value, 4),
        "interval": [round(low, 4), round(high, 4)],
        "target": setting.target,
        "ok": high <= setting.target,
    }


def same(
    setting: Setting,
    model: torch.nn.Module,
    plain: torch.nn.Module,
    ours: Callable[[], None],
    eager: Callable[[], None],
) -> None:
    """Assert that both sides compute the same gradients."""
    for run in (ours, eager):
        torch.manual_seed(1)
        run()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None, name
        assert torch.equal(p.grad, q.grad), f"{setting.name}: gradient of {name} differs"


def paired(
    left: Callable[[], None], right: Callable[[], None], pairs: int
) -> tuple[float, float, float]:
    """Return the median of left / right with its 95 % interval.

    The sides take turns at going first.
    """
    for _ in range(WARM_UP):
        left()
        right()
    ratios = []
    for index in range(pairs):
        sides = (left, right)
        seconds = [0.0, 0.0]
        for side in (0, 1) if index % 2 else (1, 0):
            start = time.process_time()
            sides[side]()
            seconds[side] = time.process_time() - start
        ratios.append(seconds[0] / seconds[1])
    return interval(ratios)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median, between the bounds of its 95 % interval.

    The bounds are order statistics, for any distribution (normal approximation of the binomial).
    """
    ordered = sorted(ratios)
    half = 0.98 * len(ordered) ** 0.5
    low = max(0, int(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, int(len(ordered) / 2 + half + 0.5))
    return ordered[low], median(ordered), ordered[high]


if __name__ == "__main__":
    main()
