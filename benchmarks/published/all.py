"""Steps that others measured and published, predicted from their public parameters.

    python benchmarks/published/all.py

Two figures are fitted for each device and software, the shares that are reached of the peak and of
the bandwidth, on every second row of one table; nothing is fitted to a row. Needs no GPU.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.published.foundry import foundry_rows
from benchmarks.published.megatron import activation_rows, megatron_rows
from benchmarks.published.rows import predicted
from benchmarks.published.scoring import figure, time_figures
from benchmarks.published.titan import llama_rows
from steelyard.core.stack import Stack


def main() -> None:
    figures = [
        *time_figures([*megatron_rows(), *foundry_rows(), *llama_rows()]),
        *_activations(),
        *_quickness(),
    ]
    worst = max(figures, key=lambda f: f["value"] / f["target"])
    print(json.dumps({**worst, "ok": all(f["ok"] for f in figures), "figures": figures}))


def _activations() -> Iterator[dict[str, Any]]:
    errors = []
    for row, measured in activation_rows():
        found = predicted(row, Stack()).stages[0].activation_bytes
        errors.append(abs(found / measured - 1))
        print(
            f"activations {row.name:36} ~{found / 2**30:6.1f} GiB, {measured / 2**30:6.1f} GiB: "
            f"{found / measured - 1:+.1%}"
        )
    yield figure("korthikanti figure 1: mean activation error", mean(errors), 0.03)


def _quickness() -> Iterator[dict[str, Any]]:
    row = max(megatron_rows(), key=lambda r: r.layout.num_ranks)
    predicted(row, Stack())
    started = time.process_time()
    predicted(row, Stack())
    taken = time.process_time() - started
    yield figure(f"one layout of {row.layout.num_ranks:,} ranks priced, CPU-s", taken, 1.0)


if __name__ == "__main__":
    main()
