"""Published steps that nothing was fitted on: other software, models, layouts and scales.

Megatron-Core's weak scaling on H100 (its README of July 2024), torchtitan's tensor parallelism on
H100 (June 2025) and its FSDP on A100 (2024), and llm-foundry's table of 128 and more H100. For
scoring only: see presets.py. Never fit anything on these.
"""

from functools import cache, partial

from benchmarks.published.captured import captured
from benchmarks.published.foundry import foundry_row
from benchmarks.published.gpt import Shape
from benchmarks.published.rows import Row, facts, machines
from benchmarks.published.titan import llama_row
from steelyard.hardware.software_stack import SoftwareStack
from steelyard.ir.model_blocks import MIXED_WIDE_GRADIENTS
from steelyard.ir.parallel_layout import ParallelLayout

_graph = cache(captured)


def held_out_rows() -> list[Row]:
    return [
        *(_megatron_core(line) for line in facts("held_out_megatron_core")),
        *(llama_row(line) for line in facts("held_out_llama")),
        *(foundry_row(line) for line in facts("held_out_foundry")),
    ]


def _megatron_core(line: dict[str, str]) -> Row:
    """Return a row of a GPT with FlashAttention.

    The optimizer is sharded, as --overlap-param-gather needs it.
    """
    names = ("hidden", "heads", "layers", "sequence", "vocabulary")
    shape = Shape(**{name: int(line[name]) for name in names}, dropout=0.0, flash=True)
    batch, micro, data = (int(line[n]) for n in ("global_batch", "micro_batch", "data"))
    layout = ParallelLayout(
        tensor=int(line["tensor"]),
        pipeline=int(line["pipeline"]),
        data=data,
        micro_batches=batch // (data * micro),
        virtual=int(line["virtual"]),
        state_stage=1,
        overlaps=True,
        regathers_activations=line["tensor"] != "1",
    )
    s, l, h, v = shape.sequence, shape.layers, shape.hidden, shape.vocabulary
    model_flops = 72 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
    rate = float(line["tflops_per_gpu"]) * 1e12 * layout.num_ranks
    return Row(
        family="megatron-core, H100",
        table=line["table"],
        name=f"{line['model']} on {layout.num_ranks}",
        # --tp-comm-overlap, which its README names, needs --sequence-parallel.
        graph=partial(
            _graph,
            shape,
            micro_batch=micro,
            tensor=layout.tensor,
            sequence_parallel=layout.tensor > 1,
        ),
        cluster=machines("dgx-h100", layout.num_ranks),
        layout=layout,
        formats=MIXED_WIDE_GRADIENTS,
        stack=SoftwareStack(),
        num_blocks=shape.layers,
        model_flops=model_flops,
        alike="",
        step_seconds=model_flops / rate,
        outside=True,
    )
