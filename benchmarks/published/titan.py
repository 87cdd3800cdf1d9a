"""Steps of Llama 3.1 under torchtitan on H100, and of "The Llama 3 Herd of Models", table 4.

benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan. Rows of eight-bit floats and
those that part the sequence among ranks are left out. Not for predicting them: see rows.py.
"""

from functools import cache, partial

from benchmarks.published.captured import captured_llama
from benchmarks.published.llama import LlamaShape
from benchmarks.published.rows import Row, declared, facts, machines
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.software_stack import SoftwareStack, StageSendMode
from steelyard.ir.model_blocks import MIXED_WIDE_GRADIENTS, ActivationPolicy, Formats
from steelyard.ir.parallel_layout import ParallelLayout

# Shards are kept in single precision and gathered in half precision: the bytes of weights and
# states together are those that are kept.
_SINGLE_GATHERED_HALF = Formats(weight_bytes=2, gradient_bytes=4, state_bytes=10)
# "Selective" recomputes a block except for attention and every second matrix product.
_SPARED = ("attention.query", "attention.value", "attention.core", "feed.gate", "feed.down")
_AGAIN = {"none": ((), ()), "selective": (("",), _SPARED), "full": (("",), ())}
# "Each H100 GPU is equipped with 96GB HBM2e with 2.4 TB/sec peak memory bandwidth ... the default
# 500W power limit": the peaks are those of the usual one.
_TITAN = """
[device.H100-96GB]
preset = "H100-SXM5"
memory = "96 GiB"
memory_bandwidth = "2400 GB/s"
[scope.node]
members = { H100-96GB = 8 }
link = "nvlink-h100"
out_link = "infiniband-ndr"
out_ports = 8
"""
# The attention kernels of both did not use all of an H100: see foundry.py.
_HOPPER_ATTENTION = 0.629
_DGX = {False: "dgx-h100", True: "dgx-a100-80gb"}
_graph = cache(captured_llama)


def llama_rows() -> list[Row]:
    return [llama_row(line) for line in facts("llama")]


def llama_row(line: dict[str, str]) -> Row:
    names = ("hidden", "inner", "heads", "pairs", "layers", "sequence", "vocabulary")
    shape = LlamaShape(**{name: int(line[name]) for name in names})
    batch, micro, data = (int(line[n]) for n in ("global_batch", "micro_batch", "data"))
    again, spared = _AGAIN[line["recompute"]]
    layout = ParallelLayout(
        tensor=int(line["tensor"]),
        pipeline=int(line["pipeline"]),
        data=data,
        micro_batches=batch // (data * micro),
        virtual=int(line["virtual"]),
        state_stage=int(line["state_stage"]),
        regathers_activations=int(line["tensor"]) > 1,
    )
    is_titan = line["table"].startswith("titan")
    ranks = layout.num_ranks
    on_a100 = line.get("device", "").startswith("A100")
    here = _titan(ranks) if is_titan and not on_a100 else machines(_DGX[on_a100], ranks)
    return Row(
        family="llama, A100" if on_a100 else "llama, H100",
        table=line["table"],
        name=f"{line['model']} on {ranks}, {line['software']}",
        # Both shard the values between tensor-parallel products along the sequence.
        graph=partial(
            _graph,
            shape,
            micro_batch=micro,
            tensor=layout.tensor,
            sequence_parallel=layout.tensor > 1,
        ),
        cluster=here,
        layout=layout,
        stage_blocks=tuple(map(int, line["stage_blocks"].split())),
        policy=ActivationPolicy(recomputed_modules=again, spared=spared),
        formats=_SINGLE_GATHERED_HALF if is_titan else MIXED_WIDE_GRADIENTS,
        stack=SoftwareStack(
            fuses=line["software"] != "eager",
            rings_only=True,
            attention_share=1.0 if on_a100 else _HOPPER_ATTENTION,
            # "We use asynchronous point-to-point communication in PP" (Llama 3, section 3.3.2).
            handing=StageSendMode.AT_ONCE if is_titan else StageSendMode.BESIDE,
        ),
        num_blocks=shape.layers,
        model_flops=shape.model_flops(batch),
        alike=line["software"],
        step_seconds=_seconds(line, shape, batch, ranks),
        outside=not is_titan,
        peak_bytes=float(line["peak_gib"] or 0) * 2**30,
        beside=f"what the allocator had reserved, {line['software']}",
    )


def _seconds(line: dict[str, str], shape: LlamaShape, batch: int, ranks: int) -> float:
    if line["tokens_per_s_per_gpu"]:
        return batch * shape.sequence / (float(line["tokens_per_s_per_gpu"]) * ranks)
    return shape.model_flops(batch) / (float(line["tflops_per_gpu"]) * 1e12 * ranks)


@cache
def _titan(num_devices: int) -> Cluster:
    return declared(_TITAN + f"[scope.cluster]\nmembers = {{ node = {num_devices // 8} }}\n")
