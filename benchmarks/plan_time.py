"""Measures the CPU time of the search on graphs of 1,000, 5,000 and 10,000 nodes.

The step is a GPT with as many blocks as needed, captured, at declared costs. The budget is half
way between the least memory of a first sweep and the memory of the step without trades. The
figures are the CPU seconds of the search alone, and the distance of its plan from the proven
bound. Needs no GPU.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from steelyard.ir.program import Program
from steelyard.plans.budget import Budget
from steelyard.predict.cost_table import CostTable
from steelyard.search import StepSearch
from steelyard.search.single.explore import sketch
from steelyard.trades import TRADES
from steelyard.trades.recompute import recomputable
from tests.harness import DEVICE
from tests.support.stepping import source_of
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

SIZES = ((1_000, 1.5), (5_000, 8.0), (10_000, 20.0))
MOST_GAP = 0.05
_PER_BLOCK = 160
# Without micro-batches: each number of them needs its own capture and search.
_TRADES = tuple(trade for trade in TRADES if trade.name != "accumulate")


def main() -> None:
    torch.set_num_threads(1)
    asked = [size for size in SIZES if len(sys.argv) < 2 or str(size[0]) in sys.argv[1:]]
    figures = [figure for nodes, seconds in asked for figure in measure(nodes, seconds)]
    worst = max(figures, key=lambda f: f["value"] / f["target"])
    print(json.dumps({**worst, "ok": all(f["ok"] for f in figures), "figures": figures}))


def measure(nodes: int, most_seconds: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = GPT(layers=round(nodes / _PER_BLOCK), width=64, heads=2, vocabulary=256, length=64)
    source = source_of((model, next_token_loss, tokens(4, 64, 256)))
    program = Program.plain(source.graph(micro_batches=1))
    count = sum(not node.is_input for node in program.graph.nodes)
    costs = CostTable(device=DEVICE)
    swept = sketch(program, costs, recomputable(program.graph))
    half_way = (swept.least.peak_bytes + swept.plain.peak_bytes) // 2
    start = time.process_time()
    search = StepSearch(program, trades=_TRADES, source=source, costs=costs)
    found = search.find(Budget(memory_bytes=half_way))
    seconds = time.process_time() - start
    assert found.gap is not None
    print(
        f"{count} nodes: {seconds:.1f} CPU-s, gap {found.gap.share:.2%}, {len(found.rules)} rules",
        flush=True,
    )
    return [
        {
            "name": f"search of {count} nodes, CPU seconds",
            "value": round(seconds, 2),
            "interval": None,
            "target": most_seconds,
            "ok": seconds <= most_seconds,
        },
        {
            "name": f"gap of its plan, {count} nodes",
            "value": round(found.gap.share, 4),
            "interval": None,
            "target": MOST_GAP,
            "ok": found.gap.share <= MOST_GAP,
        },
    ]


if __name__ == "__main__":
    main()
