"""Two plans for a GPT of 1.3 billion on two L4, measured for Mist (EuroSys 2025).

Dazz993/Mist, benchmark/mist/tuned_configs/l4-24gb, which also says that nothing is dropped, that
products have no bias and the head weights of its own, and 4.5 GB/s between the two. Not for
predicting them: see rows.py.
"""

from functools import cache, partial

from benchmarks.published.captured import captured
from benchmarks.published.gpt import Shape
from benchmarks.published.rows import Row, declared, facts
from steelyard.hardware.software_stack import SoftwareStack
from steelyard.ir.model_blocks import MIXED
from steelyard.ir.parallel_layout import ParallelLayout

_PAIR = """
[link.between-two]
rate = "4.5 GB/s"
latency = "10 us"
[scope.node]
members = { L4 = 2 }
link = "between-two"
"""
_graph = cache(captured)


def mist_rows() -> list[Row]:
    return [_row(line) for line in facts("mist")]


def _row(line: dict[str, str]) -> Row:
    names = ("hidden", "heads", "layers", "sequence", "vocabulary")
    flash = line["flash"] == "yes"
    shape = Shape(**{name: int(line[name]) for name in names}, dropout=0.0, flash=flash, bare=True)
    batch, micro = int(line["global_batch"]), int(line["micro_batch"])
    blocks = tuple(int(count) for count in line["stage_blocks"].split("/"))
    layout = ParallelLayout(pipeline=len(blocks), micro_batches=batch // micro)
    s, l, h, v = shape.sequence, shape.layers, shape.hidden, shape.vocabulary
    return Row(
        family="mist, L4",
        table="mist",
        name=f"GPT-1.3B, {'flash' if flash else 'spelled out'}, {micro} at once",
        graph=partial(_graph, shape, micro_batch=micro, tensor=1),
        cluster=declared(_PAIR),
        layout=layout,
        stage_blocks=blocks,
        formats=MIXED,
        # mist/modules: fused_softmax.py, fused_dense.py, fused_layer_norm.py.
        stack=SoftwareStack(fuses=True),
        num_blocks=shape.layers,
        model_flops=72 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h)),
        alike="",
        step_seconds=float(line["step_seconds"]),
        peak_bytes=float(line["peak_mib"]) * 2**20,
    )
