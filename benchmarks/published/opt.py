"""OPT as Sailor's Megatron-DeepSpeed builds it, from its public parameters and on the meta device.

third_party/Megatron-DeepSpeed/megatron/model/opt_model.py of eth-easl/sailor at cf2c8e3: learned
positions, nothing dropped, queries not scaled, scores masked in place, ReLU, and a head with
weights of its own; the sequence is in front. Not for running: it has no values.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.published.gpt import Shape, loss

__all__ = ["OPT", "loss"]


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)).masked_fill_(mask, -10000.0)
        mixed: Tensor = functional.softmax(scores, dim=-1) @ v
        return mixed


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(shape.hidden, shape.hidden) for _ in range(4)
        )
        self.core = Core()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        sequence, batch, hidden = x.shape
        q, k, v = (
            linear(x).view(sequence, batch, self.heads, -1).permute(1, 2, 0, 3)
            for linear in (self.query, self.key, self.value)
        )
        mixed = self.core(q, k, v, mask).permute(2, 0, 1, 3).reshape(sequence, batch, hidden)
        out: Tensor = self.out(mixed)
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape)
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        out: Tensor = x + self.down(functional.relu(self.up(self.norm2(x))))
        return out


class OPT(nn.Module):
    mask: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        mask = torch.ones(shape.sequence, shape.sequence, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, tokens: Tensor) -> Tensor:
        x = (self.table(tokens) + self.positions.weight).transpose(0, 1).contiguous()
        for block in self.blocks:
            x = block(x, self.mask)
        logits: Tensor = self.head(self.norm(x))
        return logits
