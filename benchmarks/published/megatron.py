"""Steps of Megatron-LM on DGX A100: predicted from public parameters, beside what was published.

Two figures are fitted, the shares of the A100's peak and of its bandwidth that are reached, on
every second row of one table; its other rows and the other tables are scored with them. Each table
in turn; and once nothing is fitted.
The share of the bandwidth may pass one: operators are priced apart, and Megatron fuses some. Beside
each error stands the naive one: a constant efficiency, the median of the table's other rows that
recompute the same.

    python benchmarks/published/megatron.py

Needs no GPU. Not for systems that keep parts of weights on each rank.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.published.captured import BLOCKS, captured
from benchmarks.published.gpt import Shape
from benchmarks.published.rows import Row, activation_rows, megatron_rows
from steelyard.core.cluster import Cluster, Device
from steelyard.core.cluster_file import decode_tree
from steelyard.core.deep_layout import MIXED
from steelyard.core.graph import Graph
from steelyard.predict.deep import DeepStep, deep_step, tensor_costs
from steelyard.predict.sections import sections

_PEAK_SHARES = tuple(s / 100 for s in range(60, 101, 5))
_BANDWIDTH_SHARES = tuple(s / 100 for s in range(60, 151, 15))
_DECLARED = (1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    row: Row
    seconds: float
    naive_seconds: float

    @property
    def error(self) -> float:
        return self.seconds / self.row.step_seconds - 1

    @property
    def naive_error(self) -> float:
        return self.naive_seconds / self.row.step_seconds - 1


@cache
def _graph(shape: Shape, micro_batch: int, tensor: int, sequence_parallel: bool) -> Graph:
    return captured(
        shape, micro_batch=micro_batch, tensor=tensor, sequence_parallel=sequence_parallel
    )


@cache
def _cluster(num_devices: int) -> Cluster:
    nodes = -(-num_devices // 8)
    text = f"[scope.cluster]\nmembers = {{ dgx-a100-80gb = {nodes} }}\n"
    return Cluster(tree=decode_tree(text)) if nodes > 1 else Cluster.named("dgx-a100-80gb")


def predicted(row: Row, shares: tuple[float, float]) -> DeepStep:
    cluster, layout = _cluster(row.layout.num_ranks), row.layout
    graph = _graph(row.shape, row.micro_batch, layout.tensor, row.sequence_parallel)
    costs = tensor_costs(cluster, layout)
    costs = replace(costs, device=_reached(costs.device, shares))
    parts = sections(graph, costs, layout, blocks=BLOCKS)
    return deep_step(parts, cluster, layout, MIXED, num_blocks=row.shape.layers)


def _reached(device: Device, shares: tuple[float, float]) -> Device:
    peak, bandwidth = shares
    return replace(
        device,
        peaks=tuple((dtype, peak * rate) for dtype, rate in device.peaks),
        bytes_per_second=bandwidth * device.bytes_per_second,
    )


def fitted(rows: Sequence[Row]) -> tuple[float, float]:
    """The shares at which the mean error of these rows is least."""

    def error(shares: tuple[float, float]) -> float:
        return mean(abs(predicted(r, shares).step_seconds / r.step_seconds - 1) for r in rows)

    return min(product(_PEAK_SHARES, _BANDWIDTH_SHARES), key=error)


def naive_seconds(row: Row, table: Sequence[Row]) -> float:
    """By rows that compute as much again: it is known what a plan recomputes."""
    others = [r for r in table if r is not row and r.layout.again == row.layout.again]
    return row.model_flops / row.layout.num_ranks / median(_rate(r) for r in others)


def _rate(row: Row) -> float:
    return row.model_flops / row.layout.num_ranks / row.step_seconds


def main() -> None:
    rows = megatron_rows()
    tables = {name: [r for r in rows if r.table == name] for name in (r.table for r in rows)}
    figures = []
    for source, of_source in ((None, []), *tables.items()):
        used = of_source[::2]
        shares = fitted(used) if used else _DECLARED
        told = f"from half of {source}" if source else "as declared"
        print(f"{told}: {shares[0]:.0%} of peak, {shares[1]:.0%} of bandwidth")
        for name, table in tables.items():
            scored = [_scored(row, shares, table) for row in table if row not in used]
            figures += _figures(f"{name} {told}", scored, is_goal=source is not None)
    figures += _memory()
    started = time.process_time()
    predicted(rows[9], _DECLARED)
    taken = time.process_time() - started
    figures.append(_figure("one layout of 3,072 ranks priced, CPU-s", taken, 1.0))
    worst = max(figures, key=lambda f: f["value"] / f["target"])
    print(json.dumps({**worst, "ok": all(f["ok"] for f in figures), "figures": figures}))


def _scored(row: Row, shares: tuple[float, float], table: Sequence[Row]) -> Scored:
    return Scored(
        row=row,
        seconds=predicted(row, shares).step_seconds,
        naive_seconds=naive_seconds(row, table),
    )


def _figures(name: str, scored: Sequence[Scored], *, is_goal: bool) -> list[dict[str, Any]]:
    """What nothing was fitted for is printed, and not held to the goals of what was."""
    for s in scored:
        again = ",".join(a or "all" for a in s.row.layout.again)
        print(
            f"  {s.row.table:13} {s.row.model:10} {s.row.layout.num_ranks:5} ranks, {again:15} "
            f"~{s.seconds:7.2f} s, {s.row.step_seconds:7.2f} s: {s.error:+7.1%}  "
            f"naive {s.naive_error:+7.1%}"
        )
    errors = [abs(s.error) for s in scored]
    naive = mean(abs(s.naive_error) for s in scored)
    skill = mean(errors) / naive
    print(f"  median {median(errors):.1%}, worst {max(errors):.1%}, skill {skill:.2f}")
    if not is_goal:
        return []
    return [
        _figure(f"{name}: median time error", median(errors), 0.08),
        _figure(f"{name}: worst time error", max(errors), 0.20),
        _figure(f"{name}: skill", skill, 0.4 if naive > 0.12 else 1.0),
    ]


def _memory() -> list[dict[str, Any]]:
    errors = []
    for row, measured in activation_rows():
        found = predicted(row, _DECLARED).stages[0].activation_bytes
        errors.append(abs(found / measured - 1))
        print(
            f"activations {row.model:9} {'core again' if row.layout.again else 'all kept':10} "
            f"~{found / 2**30:6.1f} GiB, {measured / 2**30:6.1f} GiB: {found / measured - 1:+.1%}"
        )
    return [_figure("korthikanti figure 1: mean activation error", mean(errors), 0.03)]


def _figure(name: str, value: float, target: float) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "target": target, "ok": value <= target}


if __name__ == "__main__":
    main()
