"""Measures the CPU time until a user sees a first line, a first plan and a second one.

Each plan is made in a fresh process. Cold means an empty cache of measurements. Processes use one
thread, because CPU time of several threads also counts their waiting for each other. Models: the
one of README, and stacks of layers that are equal or, every eighth, wider.

    python benchmarks/first_minute.py [first] [layers]
"""

from __future__ import annotations

import json
import os
import pty
import resource
import subprocess
import sys
import tempfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

THREADS = "1"
ROUNDS = 3
# CPU seconds that are allowed.
TARGETS = {
    "README's model, cold": 12.0,
    "README's model, second budget": 1.0,
    "README's model, warm": 6.0,
    "README's model, cold, quick": 12.0,
    "48 equal layers": 25.0,
    "96 layers, every eighth wider": 60.0,
}
FIRST_LINE = 0.15
VERBS = (("plan", "train.py"), ("run", "train.py"), ("fit", "train.py", "--gpu", "T4"),
         ("demo",), ("doctor",))  # fmt: skip


def main() -> None:
    asked = sys.argv[1:] or ["first", "layers"]
    figures = [_first_line(verb) for verb in VERBS]
    if "first" in asked:
        figures += _plans_of_readme()
    if "layers" in asked:
        for name in ("48 equal layers", "96 layers, every eighth wider"):
            with tempfile.TemporaryDirectory() as cache:
                figures.append(_figure(name, [_planned(name, cache)["first"]]))
    worst = max(figures, key=lambda f: f["value"] / f["target"])
    print(json.dumps({**worst, "ok": all(f["ok"] for f in figures), "figures": figures}))


def _plans_of_readme() -> list[dict[str, Any]]:
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            cold = _planned("README's model", cache)
            warm = _planned("README's model", cache)
        with tempfile.TemporaryDirectory() as cache:
            quick = _planned("README's model", cache, effort="quick")
        for name, seconds in (
            ("README's model, cold", cold["first"]),
            ("README's model, second budget", cold["second"]),
            ("README's model, warm", warm["first"]),
            ("README's model, cold, quick", quick["first"]),
        ):
            found.setdefault(name, []).append(seconds)
    return [_figure(name, seconds) for name, seconds in found.items()]


def _figure(name: str, seconds: list[float]) -> dict[str, Any]:
    value, target = median(seconds), TARGETS[name]
    print(f"{name}: {', '.join(f'{s:.1f}' for s in seconds)} CPU-s", flush=True)
    return {
        "name": f"{name}, CPU seconds",
        "value": round(value, 2),
        "interval": [round(min(seconds), 2), round(max(seconds), 2)] if len(seconds) > 1 else None,
        "target": target,
        "ok": value <= target,
    }


def _planned(model: str, cache: str, *, effort: str = "normal") -> dict[str, float]:
    environ = os.environ | {"XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": THREADS}
    words = [sys.executable, __file__, "--child", model, effort]
    answer = subprocess.run(words, env=environ, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(answer.splitlines()[-1])
    return found


def _first_line(verb: tuple[str, ...]) -> dict[str, Any]:
    """Return the CPU seconds of a command on a terminal until it writes something."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text("def workload():\n    raise SystemExit\n")
        for _ in range(ROUNDS):
            pid, terminal = pty.fork()
            if pid == 0:
                os.chdir(folder)
                os.execv(sys.executable, [sys.executable, "-m", "steelyard", *verb])
            os.read(terminal, 1)
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            seconds.append(sum(map(int, times[11:13])) / os.sysconf("SC_CLK_TCK"))
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(terminal)
    value = median(seconds)
    print(f"{verb[0]}: first line after {value:.2f} CPU-s", flush=True)
    return {
        "name": f"steelyard {verb[0]}, CPU seconds to its first line",
        "value": round(value, 3),
        "interval": [min(seconds), max(seconds)],
        "target": FIRST_LINE,
        "ok": value <= FIRST_LINE,
    }


# --- one process ----------------------------------------------------------------------------------


def child(model_name: str, effort: str) -> None:
    import torch

    import steelyard as sy

    torch.manual_seed(0)
    model, batch, shares = _model(model_name)
    adamw = partial(torch.optim.AdamW, lr=3e-4)
    found = {}
    for which, memory in zip(("first", "second"), shares):
        begin = 0.0 if which == "first" else _cpu_seconds()
        planned = sy.plan(
            model, _loss, batch, optimizer=adamw, budget=sy.Budget(memory=memory), effort=effort
        )
        found[which] = _cpu_seconds() - begin
        print(planned, file=sys.stderr)
    print(json.dumps(found))


def _cpu_seconds() -> float:
    """The CPU seconds of this process so far, imports included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _model(name: str) -> tuple[Any, Any, tuple[str, ...]]:
    """Return a model, a batch and the budgets to plan for."""
    import torch
    from torch import nn

    if name == "README's model":
        layer = nn.TransformerEncoderLayer(256, nhead=8, dim_feedforward=1024, batch_first=True)
        parts: dict[str, nn.Module] = {
            "words": nn.Embedding(4096, 256),
            "encoder": nn.TransformerEncoder(layer, num_layers=4),
            "head": nn.Linear(256, 4096),
        }
        return (
            nn.Sequential(OrderedDict(parts)),
            torch.randint(4096, (8, 128)),
            ("150 MiB", "140 MiB"),
        )
    depth, wide = (48, 256) if name.startswith("48") else (96, 512)
    layers = [
        nn.TransformerEncoderLayer(
            64, nhead=4, dim_feedforward=wide if number % 8 == 7 else 256, batch_first=True
        )
        for number in range(depth)
    ]
    model = nn.Sequential(nn.Embedding(256, 64), *layers, nn.Linear(64, 256))
    return model, torch.randint(256, (8, 64)), ("60 MiB",)


def _loss(model: Any, batch: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
