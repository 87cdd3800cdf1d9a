"""OPT as Sailor's Megatron-DeepSpeed builds it, from its public parameters and on the meta device.

Source: third_party/Megatron-DeepSpeed/megatron/model/opt_model.py of eth-easl/sailor at cf2c8e3.
The model has learned position embeddings, no dropout, unscaled queries, attention scores masked in
place, ReLU, and an output layer with its own weights. The sequence is dim 0. Not for running: the
parameters have no values.
"""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional

from benchmarks.published import gpt
from benchmarks.published.gpt import Shape


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)).masked_fill_(mask, -10000.0)
        mixed: Tensor = functional.softmax(scores, dim=-1) @ v
        return mixed


class Block(gpt.Block):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.attention.core = Core()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        out: Tensor = x + self.down(functional.relu(self.up(self.norm2(x))))
        return out


class OPT(gpt.GPT):
    def __init__(self, shape: Shape) -> None:
        shape = replace(shape, dropout=0.0)
        super().__init__(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
