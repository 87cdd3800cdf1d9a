"""Steps of MPT models under llm-foundry: FSDP over 8 to 128 A100 of 40 GB, and 8 to 64 H100.

scripts/train/benchmarking/README.md of mosaicml/llm-foundry. Operators run eagerly, attention is
Flash. Not for predicting them: see rows.py.
"""

from functools import cache, partial

from benchmarks.published.captured import captured
from benchmarks.published.gpt import Shape
from benchmarks.published.rows import Row, facts, machines
from steelyard.hardware.software_stack import SoftwareStack
from steelyard.ir.model_blocks import MIXED, MIXED_WIDE_GRADIENTS, ActivationPolicy
from steelyard.ir.parallel_layout import ParallelLayout

_MACHINES = {
    "foundry-a100": "dgx-a100",
    "foundry-h100": "dgx-h100",
    "foundry-h100-large": "dgx-h100",
}
# Composer's mixed precision of FSDP: DEFAULT reduces gradients in single precision, PURE does not.
_FORMATS = {"PURE": MIXED, "DEFAULT": MIXED_WIDE_GRADIENTS}
# The attention kernels were written for the A100, whose instructions reach 62.9 % of an H100's peak
# (Luo et al., arXiv 2402.13499: recalled). NCCL gathered and scattered over rings only.
_EAGER = SoftwareStack(fuses=False, rings_only=True)
_EAGER_ON_HOPPER = SoftwareStack(fuses=False, rings_only=True, attention_share=0.629)
_graph = cache(captured)


def foundry_rows() -> list[Row]:
    return [foundry_row(line) for line in facts("foundry")]


def foundry_row(line: dict[str, str]) -> Row:
    names = ("hidden", "heads", "layers", "sequence", "vocabulary")
    shape = Shape(**{name: int(line[name]) for name in names}, dropout=0.0, flash=True)
    ranks, batch, micro = (int(line[n]) for n in ("gpus", "global_batch", "micro_batch"))
    layout = ParallelLayout(
        data=ranks,
        micro_batches=int(line["micro_batches"]),
        state_stage=int(line.get("state_stage") or 3),
    )
    assert layout.micro_batches * micro * ranks == batch
    tokens = batch * shape.sequence
    attention = 4 * shape.layers * shape.hidden * shape.sequence
    return Row(
        family=line["table"],
        table=line["table"],
        name=f"{line['model']} of {shape.sequence} on {ranks}, {line['recompute']} again",
        graph=partial(_graph, shape, micro_batch=micro, tensor=1),
        cluster=machines(_MACHINES[line["table"]], ranks),
        layout=layout,
        policy=ActivationPolicy(recomputed_modules=("",) if line["recompute"] == "full" else ()),
        formats=_FORMATS[line["formats"]],
        stack=_EAGER_ON_HOPPER if "h100" in line["table"] else _EAGER,
        num_blocks=shape.layers,
        # Counted as on that page.
        model_flops=3 * tokens * (2 * int(line["num_parameters"]) + attention),
        alike=line["recompute"],
        step_seconds=tokens / float(line["tokens_per_s"]),
        fits_ports=True,
    )
