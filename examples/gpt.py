"""A small GPT with dropout and tied embeddings, and the workload that trains it.

The model is plain PyTorch and contains nothing of Steelyard. It learns nothing, because its text is
random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import steelyard as sy

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    width: int = 256
    blocks: int = 6
    heads: int = 8
    words: int = 4096
    length: int = 256
    samples: int = 12


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.out(self.attention(self.norm(x))))
        result: Tensor = x + self.dropout(self.mlp(x))
        return result

    def attention(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        shape = (samples, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1))
        scores = q @ k.transpose(-2, -1) / shape[-1] ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = self.dropout(scores.masked_fill(later, float("-inf")).softmax(-1))
        mixed: Tensor = (weights @ v).transpose(1, 2).reshape(x.shape)
        return mixed


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.words, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def batches(size: Size) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(size.words, (size.samples, size.length + 1), generator=generator)
        yield {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()}


def workload(size: Size | None = None) -> sy.Workload:
    """Return the workload; ``steelyard plan`` looks for a function of this name in a script."""
    size = size or Size()
    torch.manual_seed(0)
    return sy.Workload(
        model=GPT(size),
        loss=loss,
        batches=partial(batches, size),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
    )
