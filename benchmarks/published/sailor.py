"""Plans for OPT-350M on up to 128 GH200, measured for the simulator of Sailor (SOSP 2025).

Megatron-DeepSpeed; of eth-easl/sailor, sailor/Planner/simulations/validation. It ran in single
precision (ae_scripts/clariden_scripts/run_opt.slurm asks for no other), whose products NVIDIA's
image of PyTorch 24.10 computes in TF32. What matters here is which plan is quicker, as much as how
quick. Not for predicting them: see rows.py.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import combinations

from benchmarks.published.captured import captured_opt
from benchmarks.published.gpt import Shape
from benchmarks.published.rows import Row, declared, facts
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.software_stack import SoftwareStack, StageSendMode
from steelyard.ir.model_blocks import SINGLE
from steelyard.ir.parallel_layout import ParallelLayout

# Padded to a multiple of 128 for each of four tensor ranks, as Megatron does it.
_SHAPE = Shape(hidden=1024, heads=16, layers=24, sequence=2048, vocabulary=50688)
# A node of Alps: four GH200 of 96 GB at 4 TB/s (recalled, without a source), and the time of a
# message to another node as the authors measured it (p2p_inter_node.csv in
# sailor/Planner/baselines/Aceso/profiler/GH-96/profiled-data-fp32: 11.9 GB/s at 1 MiB to 23.5 at
# 256).
_NODE = """
[device.GH200-96GB]
preset = "H100-SXM5"
memory = "96 GiB"
memory_bandwidth = "4000 GB/s"
peak = { float32 = "494.7 TFLOP/s" }
[link.between-nodes]
curve = [
    ["1 MiB", "87.9 us"], ["4 MiB", "249.4 us"], ["16 MiB", "823.6 us"], ["64 MiB", "2.9695 ms"],
    ["256 MiB", "11.4215 ms"],
]
[scope.node]
members = { GH200-96GB = 4 }
link = "nvlink-h100"
out_link = "between-nodes"
out_ports = 4
"""
_graph = cache(captured_opt)


def sailor_rows() -> list[Row]:
    return [_row(line) for line in facts("sailor")]


def alternatives(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Return groups of plans for the same batch on the same number of devices."""
    groups: dict[tuple[int, float], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.layout.num_ranks, row.model_flops].append(row)
    return (group for group in groups.values() if len(group) > 1)


def ordered_wrongly(group: Sequence[Row], seconds: dict[Row, float]) -> list[tuple[Row, Row]]:
    return [
        (a, b)
        for a, b in combinations(group, 2)
        if (seconds[a] < seconds[b]) != (a.step_seconds < b.step_seconds)
    ]


def regret(group: Sequence[Row], seconds: dict[Row, float]) -> float:
    """Return the time of the plan predicted to be fastest relative to the fastest, minus one."""
    chosen = min(group, key=seconds.__getitem__)
    return chosen.step_seconds / min(r.step_seconds for r in group) - 1


def _row(line: dict[str, str]) -> Row:
    names = ("pipeline", "data", "tensor", "micro_batch", "global_batch")
    pipeline, data, tensor, micro, batch = (int(line[n]) for n in names)
    layout = ParallelLayout(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        micro_batches=batch // (data * micro),
        draws_parts=True,
    )
    s, l, h, v = _SHAPE.sequence, _SHAPE.layers, _SHAPE.hidden, _SHAPE.vocabulary
    return Row(
        family="sailor, GH200",
        table="sailor",
        name=f"{batch} on {layout.num_ranks}: {tensor}x{pipeline}x{data}, {micro} at once",
        graph=partial(_graph, _SHAPE, micro_batch=micro, tensor=tensor),
        cluster=_nodes(layout.num_ranks // 4),
        layout=layout,
        stage_blocks=_stage_blocks(line["modules"]),
        formats=SINGLE,
        # It has no fused kernels for single precision, and JIT is not enabled. The engine waits for
        # each send and receive: deepspeed/pipe_engine.py.
        stack=SoftwareStack(fuses=False, handing=StageSendMode.IN_TURN),
        num_blocks=_SHAPE.layers,
        model_flops=72 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h)),
        alike="",
        step_seconds=float(line["step_seconds"]),
        peak_bytes=float(line["peak_bytes"]),
        # get_total_used_mem in deepspeed/pipe_engine.py of eth-easl/sailor.
        beside="all that nvidia-smi says is used",
    )


def _stage_blocks(modules: str) -> tuple[int, ...]:
    """Return the blocks of each stage; the table counts the embedding and the head as modules."""
    counts = [int(count) for count in modules.split("/")]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


@cache
def _nodes(count: int) -> Cluster:
    return declared(_NODE + (f"[scope.cluster]\nmembers = {{ node = {count} }}\n" * (count > 1)))
