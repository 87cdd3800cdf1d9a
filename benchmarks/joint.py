"""Compares recomputation and offload chosen together with recomputation alone.

The step is a GPT on one sample, which cannot be split. The rate of the offload memory lets half of
the saved bytes leave during the forward pass. At each of several peaks two plans are made, with
and without offload memory; all of them and the unplanned step run in turns. At a rate near zero
nothing may be offloaded, and at an infinite rate nothing recomputed. One thread, no GPU.

    python benchmarks/joint.py [FOLDER ON A DISK]
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import steelyard as sy
from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT, Link
from steelyard.ir.graph import Phase
from steelyard.plans.plan import Prediction
from steelyard.search import StepSearch
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

LENGTH, VOCABULARY = 512, 1024
# Limits as shares of the range from the least memory with recomputation alone to the unplanned
# peak.
SHARES = (0.05, 0.15, 0.3, 0.5, 0.7)
TURNS = 7
MOST_OVERHEAD, MOST_MISS = 0.5, 0.15


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    model = GPT(layers=8, width=512, heads=8, vocabulary=VOCABULARY, length=LENGTH, fused=True)
    batch = tokens(1, LENGTH, VOCABULARY)

    def planned(offload_memory: sy.OffloadMemory | None) -> sy.Planned:
        cluster = sy.Cluster.here(offload_memory=offload_memory)
        return sy.plan(copy.deepcopy(model), next_token_loss, batch, cluster=cluster)

    alone = planned(None)
    offload_memory = sy.OffloadMemory(folder, rate=half_of(alone.plan.unplanned), size="8 GiB")
    both = planned(offload_memory)
    print(f"offload memory: {offload_memory}", file=sys.stderr)
    peak = alone.plan.unplanned.peak.nbytes
    least = min(point.memory_bytes for point in alone.frontier)
    limits = {share: round(least + share * (peak - least)) for share in SHARES}
    runs: dict[str, tuple[sy.Planned, Any]] = {"plain": (alone, alone.apply(copy.deepcopy(model)))}
    for share in SHARES:
        for name, source in (("recompute", alone), ("joint", both)):
            plan = source.what_if(memory=limits[share])
            runs[f"{name} {share}"] = (plan, plan.apply(copy.deepcopy(model)))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(TURNS + 1):
        for name, (_, step) in runs.items():
            begin = time.perf_counter()
            step.backward(batch)
            took = time.perf_counter() - begin
            step.live.zero_grad()
            if turn:  # the first warms up
                seconds[name].append(took)
    ratios: dict[float, float] = {}
    bounds: dict[float, float] = {}
    misses = []
    base = alone.plan.unplanned.metrics.step_seconds.value
    for share in SHARES:
        over = {}
        for name in ("recompute", "joint"):
            plan = runs[f"{name} {share}"][0]
            predicted = plan.predicted.step_seconds.value / base
            paired = zip(seconds[f"{name} {share}"], seconds["plain"])
            measured = median(a / b for a, b in paired)
            over[name] = predicted - 1
            print(f"{name} at {share}: predicted {predicted:.3f}, measured {measured:.3f}")
            if name == "joint":
                misses.append(measured / predicted - 1)
        assert over["recompute"] > 0, "recomputation costs nothing at this peak"
        ratios[share] = max(0.0, over["joint"]) / over["recompute"]
        bounds[share] = least_overhead(both, limits[share]) / over["recompute"]
    moved, again = at_the_ends(both, list(limits.values()))
    worst_miss = max(misses, key=abs)
    figures: list[dict[str, Any]] = [
        *(
            figure(f"overhead beside recomputing alone, at {share}", ratio, MOST_OVERHEAD)
            | {"no plan below": round(bounds[share], 4)}
            for share, ratio in ratios.items()
        ),
        figure("step time measured over predicted, worst miss", abs(worst_miss), MOST_MISS),
        figure("values moved over a link without any rate", moved, 0),
        figure("values computed again beside a link that costs nothing", again, 0),
    ]
    print(json.dumps({**figures[0], "ok": all(f["ok"] for f in figures), "figures": figures}))


def figure(name: str, value: float, target: float) -> dict[str, Any]:
    return {
        "name": name, "value": round(value, 4), "interval": None, "target": target,
        "ok": value <= target,
    }  # fmt: skip


def least_overhead(both: sy.Planned, limit: int) -> float:
    """Return the search's lower bound on the overhead over the step without a plan."""
    search = both.session.search
    gap = search.find(sy.Budget(memory=limit)).gap
    assert gap is not None
    return gap.least_seconds / search.explored().plain.seconds - 1


def half_of(unplanned: Prediction) -> float:
    """Return the rate at which half of the saved values can be moved in the forward pass."""
    timeline = unplanned.timeline
    assert timeline is not None
    turn = timeline.phases.index(Phase.BACKWARD)
    saved = timeline.nbytes[turn] - unplanned.peak.resident_bytes
    return saved / 2 / timeline.seconds[turn]


def at_the_ends(both: sy.Planned, limits: list[int]) -> tuple[int, int]:
    """Count the rules that offload over a link of almost no rate, or recompute with a free link.

    Both counts should be 0.
    """
    session = both.session
    found = []
    for rate in (1.0, 1e18):
        link = Link(kind="declared", latency_seconds=0.0, bytes_per_second=rate, doubt=0.0)
        costs = replace(session.prices.costs, links={OFFLOAD_OUT: link, OFFLOAD_IN: link})
        search = StepSearch(
            session.base, trades=session.request.trades, source=session.source, costs=costs
        )
        trade = "offload" if rate == 1.0 else "recompute"
        plans = [search.find(sy.Budget(memory=limit)) for limit in limits]
        found.append(sum(r.count for plan in plans for r in plan.rules if r.trade == trade))
    return found[0], found[1]


if __name__ == "__main__":
    main()
