"""One tensor rank's graph of a published model: three of its blocks, one micro-batch, no values.

Not for what it costs: see megatron.py.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.published import gpt, llama
from benchmarks.published.gpt import GPT, Shape
from benchmarks.published.llama import Llama, LlamaShape
from benchmarks.published.opt import OPT
from steelyard.capture.spmd.partition import partition
from steelyard.capture.spmd.sequence_parallel import sequence_placements
from steelyard.capture.spmd.shardable_regions import regions
from steelyard.capture.step import CapturedStep
from steelyard.ir.collective import Transport
from steelyard.ir.graph import Graph
from steelyard.ir.parallel_layout import TENSOR
from steelyard.ir.placement import Placement
from steelyard.ir.sharding_choice import ShardingChoice

BLOCKS = "blocks"
NCCL = Transport(name="nccl")
Loss = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


def captured(
    shape: Shape, *, micro_batch: int, tensor: int, sequence_parallel: bool = False
) -> Graph:
    with torch.device("meta"):
        model = GPT(replace(shape, layers=3)).to(torch.float16)
    graph = _whole(model, gpt.loss, micro_batch, shape.sequence)
    return graph if tensor == 1 else _in_parts(graph, tensor, sequence_parallel, micro_batch)


def captured_llama(
    shape: LlamaShape, *, micro_batch: int, tensor: int, sequence_parallel: bool = False
) -> Graph:
    with torch.device("meta"):
        model = Llama(replace(shape, layers=3)).to(torch.bfloat16)
    graph = _whole(model, llama.loss, micro_batch, shape.sequence)
    return graph if tensor == 1 else _in_parts(graph, tensor, sequence_parallel, micro_batch)


def captured_opt(shape: Shape, *, micro_batch: int, tensor: int) -> Graph:
    with torch.device("meta"):
        model = OPT(replace(shape, layers=3))
    graph = _whole(model, gpt.loss, micro_batch, shape.sequence)
    return graph if tensor == 1 else _in_parts(graph, tensor, False, micro_batch)


def _whole(model: nn.Module, loss: Loss, micro_batch: int, sequence: int) -> Graph:
    tokens = torch.zeros(micro_batch, sequence, dtype=torch.long, device="meta")
    return CapturedStep(model=model, loss=loss, batch=(tokens, tokens)).captured().graph


def _in_parts(graph: Graph, tensor: int, sequence_parallel: bool, micro_batch: int) -> Graph:
    """Shard every region that can be sharded: columns and rows of each block, and the table."""
    found = regions(graph, num_ranks=tensor)
    lies = {name: at for region in found for name, at in region.inputs}
    values: tuple[tuple[str, Placement], ...] = ()
    if sequence_parallel:
        values = sequence_placements(
            graph, found, num_ranks=tensor, holds_samples=lambda size: size == micro_batch
        )
    choice = ShardingChoice(
        axis=TENSOR, num_ranks=tensor, inputs=tuple(lies.items()), values=values
    )
    return partition(graph, choice, rank=0, transport=NCCL)
