"""Compares the commands that need no torch with `import torch`: CPU time of fresh processes.

Each round starts every command once, in turn. The figure is that of the slowest command: the
median of the ratios, with its 95 % interval.

    python benchmarks/startup.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.runner import interval

ROUNDS, WARM_UP = 20, 2
TARGET = 0.25
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "transformers_gpt2.py"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "gpt2.plan.toml"
        _steelyard("plan", str(EXAMPLE), "--memory", "60MiB", "-o", str(plan))
        verbs = {
            "--help": ("--help",),
            "explain": ("explain", str(plan)),
            "explain --json": ("explain", str(plan), "--json"),
        }
        ratios: dict[str, list[float]] = {name: [] for name in verbs}
        for number in range(WARM_UP + ROUNDS):
            torch = _cpu_seconds("-c", "import torch")
            for name, words in verbs.items():
                ratio = _steelyard(*words) / torch
                if number >= WARM_UP:
                    ratios[name].append(ratio)
    figures = [_figure(name, found) for name, found in ratios.items()]
    worst = max(figures, key=lambda f: f["value"])
    print(json.dumps({**worst, "ok": all(f["ok"] for f in figures), "figures": figures}))
    return 0


def _figure(name: str, ratios: list[float]) -> dict[str, object]:
    low, value, high = interval(ratios)
    return {
        "name": f"steelyard {name} / import torch, CPU time",
        "value": round(value, 4),
        "interval": [round(low, 4), round(high, 4)],
        "target": TARGET,
        "ok": high <= TARGET,
    }


def _steelyard(*words: str) -> float:
    return _cpu_seconds("-m", "steelyard", *words)


def _cpu_seconds(*words: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
