"""A Llama from its public parameters, on the meta device: "The Llama 3 Herd of Models", 2024.

The model has RMSNorm, rotary position embeddings, a gated MLP, grouped-query attention, and
attention as one fused kernel. Not for running: the parameters have no values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    hidden: int
    inner: int
    heads: int
    pairs: int
    layers: int
    sequence: int
    vocabulary: int

    @property
    def num_parameters(self) -> int:
        """The parameters of matrix products, without the embedding table and the norms."""
        width = self.hidden // self.heads
        attention = 2 * self.hidden * width * (self.heads + self.pairs)
        block = attention + 3 * self.hidden * self.inner
        return self.layers * block + self.vocabulary * self.hidden

    def model_flops(self, batch: int) -> float:
        """Return the FLOPs of a step without recomputation; attention is counted without a mask."""
        attention = 12 * self.layers * self.hidden * self.sequence
        return batch * self.sequence * (6 * self.num_parameters + attention)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.width = shape.hidden // shape.heads
        self.times = shape.heads // shape.pairs
        small = shape.pairs * self.width
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key = nn.Linear(shape.hidden, small, bias=False)
        self.value = nn.Linear(shape.hidden, small, bias=False)
        self.core = Core()
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = (
            linear(x).view(batch, sequence, -1, self.width)
            for linear in (self.query, self.key, self.value)
        )
        q, k = turned(q, turns), turned(k, turns)
        k, v = (y.repeat_interleave(self.times, 2) if self.times > 1 else y for y in (k, v))
        mixed = self.core(*(y.transpose(1, 2) for y in (q, k, v)))
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return out


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turns
    first, second = x.float().chunk(2, dim=-1)
    both = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(both, dim=-1).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(shape.hidden), Norm(shape.hidden)
        self.attention = Attention(shape)
        self.feed = FeedForward(shape)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), turns)
        out: Tensor = x + self.feed(self.norm2(x))
        return out


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        half = shape.hidden // shape.heads // 2
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(shape.sequence, 1, half))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
