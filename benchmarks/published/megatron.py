"""Steps of Megatron-LM on DGX A100, and of DeepSpeed's ZeRO-3 beside it.

Tables 1 and 2 and figures 11 and 12 of Narayanan et al., SC 2021; tables 4 and 5 and figure 1 of
Korthikanti et al., 2022.
Not for predicting them: see rows.py.
"""

from dataclasses import replace
from functools import cache, partial

from benchmarks.published.captured import captured
from benchmarks.published.gpt import Shape
from benchmarks.published.rows import Row, facts, machines
from steelyard.hardware.software_stack import SoftwareStack
from steelyard.ir.model_blocks import MIXED, ActivationPolicy
from steelyard.ir.parallel_layout import ParallelLayout

_AGAIN = {"none": (), "selective": ("attention.core",), "full": ("",)}
# "We implemented fused kernels ... for bias + GeLU, bias + dropout + add, scale, mask and softmax"
# (SC 2021, section 4.2), in both systems. DeepSpeed gathers each weight by itself. Gathering
# activations again overlaps with computing (Korthikanti et al., section 4.2.2), and so do gradients
# in Megatron's LinearWithGradAccumulationAndAsyncAllreduce of that time.
_STACKS = {
    "megatron": SoftwareStack(fuses=True),
    "megatron-2022": SoftwareStack(fuses=True, overlaps_tensor=True),
    "deepspeed": SoftwareStack(fuses=True, flat=False, rings_only=True),
}
# Its optimizer, as megatron/optimizer/optimizer.py of NVIDIA/Megatron-LM at b4bc51b1 calls it: the
# gradient to single precision (2 + 4), unscaled (4 + 4), its norm (4), Adam (16 + 12), and the
# weight to half precision (4 + 2).
_FORMATS = replace(MIXED, update_bytes=52)
_graph = cache(captured)


def megatron_rows() -> list[Row]:
    return [_row(line) for line in facts("megatron")]


def activation_rows() -> list[tuple[Row, float]]:
    """Return rows with the measured bytes of activations on the first stage."""
    return [
        (row, float(line["activation_gib"]) * 2**30)
        for line in facts("korthikanti_activations")
        for row in [_other_way(line)]
    ]


def layer_rows() -> list[tuple[Row, float, float]]:
    """Return rows with the measured seconds of one layer, forward and backward."""
    return [
        (_other_way(line), float(line["forward_ms"]) / 1e3, float(line["backward_ms"]) / 1e3)
        for line in facts("korthikanti_layers")
    ]


def figure_rows() -> list[tuple[str, Row]]:
    """Return rows of the two figures, without measurements: their bars have no printed numbers."""
    same = {"system": "megatron", "state_stage": "0", "recompute": "full", "step_seconds": "1"}
    more = {"sequence_parallel": "no", "tflops_per_gpu": "0"}
    return [
        (line["figure"], _row({**line, **same, **more, "table": f"figure {line['figure']}"}))
        for line in facts("megatron_figures")
    ]


def _other_way(line: dict[str, str]) -> Row:
    """Return the row of a model from the table of whole steps, with this line's values instead."""
    of = {row["model"]: row for row in facts("megatron") if row["table"] == "korthikanti-5"}
    return _row({**of[line["model"]], **line})


def _row(line: dict[str, str]) -> Row:
    names = ("hidden", "heads", "layers", "sequence", "vocabulary")
    shape = Shape(**{name: int(line[name]) for name in names})
    batch, micro, data = (int(line[n]) for n in ("global_batch", "micro_batch", "data"))
    parallel = line["sequence_parallel"] == "yes"
    layout = ParallelLayout(
        tensor=int(line["tensor"]),
        pipeline=int(line["pipeline"]),
        data=data,
        micro_batches=batch // (data * micro),
        virtual=int(line["virtual"]),
        state_stage=int(line["state_stage"]),
        draws_parts=True,
        regathers_activations=parallel,
        # --DDP-impl torch, in examples/sc21/run_table_1.sh at 6985e589.
        overlaps=line["table"] == "sc21-1" and line["pipeline"] == "1",
    )
    of_model = _model_flops(shape, batch)
    rate = float(line["tflops_per_gpu"] or 0) * 1e12 * layout.num_ranks
    return Row(
        family="megatron, A100",
        table=line["table"],
        name=f"{line['model']} on {layout.num_ranks}, {line['recompute']} again",
        graph=partial(
            _graph,
            shape,
            micro_batch=micro,
            tensor=layout.tensor,
            sequence_parallel=parallel,
        ),
        cluster=machines("dgx-a100-80gb", layout.num_ranks),
        layout=layout,
        policy=ActivationPolicy(recomputed_modules=_AGAIN[line["recompute"]]),
        formats=_FORMATS,
        stack=_STACKS[line["system"]],
        num_blocks=shape.layers,
        model_flops=of_model,
        alike=line["recompute"],
        outside=line["system"] == "deepspeed",
        fits_ports=line["system"] == "deepspeed",
        step_seconds=float(line["step_seconds"] or 0) or _printed_flops(shape, batch) / rate,
    )


def _model_flops(shape: Shape, batch: int) -> float:
    """Return the FLOPs of Narayanan et al., SC 2021, appendix, without its factor of 4/3."""
    s, l, h, v = shape.sequence, shape.layers, shape.hidden, shape.vocabulary
    return 72 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))


def _printed_flops(shape: Shape, batch: int) -> float:
    """Return the paper's FLOPs of a step, which include the recomputed forward pass."""
    s, l, h, v = shape.sequence, shape.layers, shape.hidden, shape.vocabulary
    return 96 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
