"""One tensor rank's graph of a published model: three of its blocks, one micro-batch, no values.

Not for what it costs: see megatron.py.
"""

from dataclasses import replace

import torch

from benchmarks.published.gpt import GPT, Shape, loss
from steelyard.capture.parted import parted
from steelyard.capture.regions import regions
from steelyard.capture.source import StepSource
from steelyard.core.collective import Transport
from steelyard.core.graph import Graph
from steelyard.core.layout import TENSOR
from steelyard.core.parting import Parting

BLOCKS = "blocks"
NCCL = Transport(name="nccl")


def captured(shape: Shape, *, micro_batch: int, tensor: int) -> Graph:
    with torch.device("meta"):
        model = GPT(replace(shape, layers=3)).to(torch.float16)
    tokens = torch.zeros(micro_batch, shape.sequence, dtype=torch.long, device="meta")
    graph = StepSource(model=model, loss=loss, batch=(tokens, tokens)).captured().graph
    return graph if tensor == 1 else in_parts(graph, tensor)


def in_parts(graph: Graph, tensor: int) -> Graph:
    """Every region that could be cut is: columns and rows of each block, and the table."""
    lies = {name: at for r in regions(graph, num_ranks=tensor) for name, at in r.inputs}
    choice = Parting(axis=TENSOR, num_ranks=tensor, inputs=tuple(lies.items()))
    return parted(graph, choice, rank=0, transport=NCCL)
