"""A GPT from its public parameters and on the meta device, as Megatron-LM and others train it.

Learned positions, attention in a module of its own (``core``, what selective recomputation computes
again), dropout, and a head that is the table of the embedding. What goes from block to block has
the sequence in front, as Megatron-LM lays it, so that neither attention nor a part of the sequence
needs a copy. Not for running: it has no values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a GPT.

    ``vocabulary`` is padded, as in Megatron, so that every rank has an equal share.

    ``flash``: attention is one kernel, as in "FlashAttention" (Dao et al., NeurIPS 2022). ``bare``:
    products have no bias, and the head has weights of its own.
    """

    hidden: int
    heads: int
    layers: int
    sequence: int
    vocabulary: int
    dropout: float = 0.1
    flash: bool = False
    bare: bool = False


def dropout(shape: Shape) -> nn.Module:
    """Return a dropout, or an identity if the rate is 0.

    A dropout with a rate of 0 would be captured as a copy, which eager PyTorch does not make.
    """
    return nn.Dropout(shape.dropout) if shape.dropout else nn.Identity()


class Core(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dropout = dropout(shape)
        self.flash = shape.flash

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if self.flash:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        shares = functional.softmax(scores.masked_fill(mask, -10000.0), dim=-1)
        mixed: Tensor = self.dropout(shares) @ v
        return mixed


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(shape.hidden, shape.hidden, bias=not shape.bare) for _ in range(4)
        )
        self.core = Core(shape)

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
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden, bias=not shape.bare)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden, bias=not shape.bare)
        self.dropout1, self.dropout2 = (dropout(shape) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x), mask))
        grown = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.dropout2(self.down(grown))


class GPT(nn.Module):
    mask: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.dropout = dropout(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if not shape.bare:
            self.head.weight = self.table.weight
        mask = torch.ones(shape.sequence, shape.sequence, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout((self.table(tokens) + self.positions.weight).transpose(0, 1).contiguous())
        for block in self.blocks:
            x = block(x, self.mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.t().flatten())
