"""Models of our own: the plain shapes of training, and the published nets whose cost is known.

`alexnet`, `alexnet_2012` and `resnet152` at scale "small" are the published nets at batch 1: build
them under FakeTensorMode. Forward GFLOP there, a multiply-add counted as two, by torch 2.13's
FlopCounterMode: alexnet 1.4284 (61.10 M parameters), alexnet_2012 1.4488 (60.97 M), resnet152
22.565 (60.19 M; published as 11.3 G multiply-adds).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Sample, Scale, Shelf, class_loss, images, next_token_loss, tokens

_shelf = Shelf()


# --- transformers ---------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention, written out or through scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, dropout: float, *, fused: bool) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.fused = fused
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.out_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            dropout = self.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=True
            )
        else:
            scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            shares = scores.masked_fill(future, float("-inf")).softmax(-1)
            mixed = F.dropout(shares, self.dropout, self.training) @ value
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        result: Tensor = self.out_dropout(self.out(mixed))
        return result


class Feedforward(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.down(self.act(self.up(x))))
        return result


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class GPT(nn.Module):
    """A decoder with learned positions and a head tied to the token embedding."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int,
        length: int,
        dropout: float = 0.1,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, Attention(width, heads, dropout, fused=fused), Feedforward(width, dropout))
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.token(ids) + self.position(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _gpt(scale: Scale, *, fused: bool) -> Sample:
    if scale == "tiny":
        model = GPT(layers=2, width=32, heads=2, vocabulary=64, length=16, fused=fused)
        return model, next_token_loss, tokens(4, 16, 64)
    model = GPT(layers=6, width=256, heads=8, vocabulary=2048, length=128, fused=fused)
    return model, next_token_loss, tokens(8, 128, 2048)


@_shelf.add("dropout, tied head, attention spelled out")
def gpt(scale: Scale) -> Sample:
    return _gpt(scale, fused=False)


@_shelf.add("dropout inside scaled_dot_product_attention, tied head")
def gpt_sdpa(scale: Scale) -> Sample:
    return _gpt(scale, fused=True)


class Experts(nn.Module):
    """Top-k mixture with dense dispatch: every expert sees every token, the gate zeroes the rest.

    Shapes do not depend on the routing, so it can be traced.
    """

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / math.sqrt(2 * width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.router(x).softmax(-1)
        experts = gates.shape[-1]
        mask = F.one_hot(gates.topk(self.chosen, dim=-1).indices, experts).sum(-2).to(gates.dtype)
        shares = gates * mask
        shares = shares / shares.sum(-1, keepdim=True)
        hidden = F.silu(torch.einsum("btd,edh->beth", x, self.up))
        mixed = torch.einsum("beth,ehd,bte->btd", hidden, self.down, shares)
        balance = experts * (mask.mean((0, 1)) * gates.mean((0, 1))).sum()
        return mixed, balance


class MoE(nn.Module):
    def __init__(self, *, layers: int, width: int, experts: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.attentions = nn.ModuleList(
            Attention(width, 2, 0.1, fused=False) for _ in range(layers)
        )
        self.experts = nn.ModuleList(Experts(width, experts, 2) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.token(ids)
        balance = x.new_zeros(())
        for index, (attention, experts) in enumerate(
            zip(self.attentions, self.experts, strict=True)
        ):
            x = x + attention(self.norms[2 * index](x))
            mixed, uneven = experts(self.norms[2 * index + 1](x))
            x, balance = x + mixed, balance + uneven
        return self.head(self.norms[-1](x)), balance


def _moe_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, balance = model(batch["x"])
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten()) + 0.01 * balance


@_shelf.add("top-k routing with static shapes, and a balance loss over the whole batch")
def moe(scale: Scale) -> Sample:
    if scale == "tiny":
        return MoE(layers=2, width=16, experts=4, vocabulary=64), _moe_loss, tokens(4, 8, 64)
    model = MoE(layers=4, width=128, experts=8, vocabulary=1024)
    return model, _moe_loss, tokens(16, 128, 1024)


# --- dense and recurrent --------------------------------------------------------------------------


@_shelf.add("linear, GELU, dropout")
def mlp(scale: Scale) -> Sample:
    width, layers, count = (32, 3, 8) if scale == "tiny" else (1024, 6, 1024)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)]
    model = nn.Sequential(*parts, nn.Linear(width, 10))
    batch = {"x": torch.randn(count, width), "y": torch.randint(0, 10, (count,))}
    return model, class_loss, batch


class Recurrent(nn.Module):
    def __init__(self, *, width: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.cells = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.cells(self.token(ids))
        logits: Tensor = self.head(states)
        return logits


@_shelf.add("nn.LSTM, two layers, dropout between them")
def lstm(scale: Scale) -> Sample:
    if scale == "tiny":
        return Recurrent(width=16, vocabulary=64), next_token_loss, tokens(4, 8, 64)
    return Recurrent(width=512, vocabulary=1024), next_token_loss, tokens(64, 32, 1024)


# --- convolutions ---------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two 3x3 convolutions with a shortcut, and in-place ReLU."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        result: Tensor = self.relu(y + self.shortcut(x))
        return result


@_shelf.add("BatchNorm, in-place ReLU, residual")
def resnet_bn(scale: Scale) -> Sample:
    width, count = (4, 4) if scale == "tiny" else (32, 64)
    stages = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        *(nn.Sequential(Residual(i, o, s), Residual(o, o, 1)) for i, o, s in stages),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )
    return model, class_loss, images(count, 16 if scale == "tiny" else 32, 10)


@_shelf.add("a chain of convolution, BatchNorm, ReLU, pooling")
def convnet_bn(scale: Scale) -> Sample:
    width, count = (4, 4) if scale == "tiny" else (48, 48)
    parts: list[nn.Module] = []
    inner = 3
    for outer in (width, 2 * width, 4 * width):
        parts += [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]
        parts += [nn.MaxPool2d(2)]
        inner = outer
    size = 16 if scale == "tiny" else 64
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * width, 10)]
    return nn.Sequential(*parts, *head), class_loss, images(count, size, 10)


def _alexnet(convs: nn.Sequential, features: int, hidden: int, classes: int) -> nn.Sequential:
    """Return the two hidden layers and the classifier, each after dropout, which both forms
    share."""
    return nn.Sequential(
        convs,
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(features, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, classes),
    )


@_shelf.add("one column, as in Krizhevsky 2014, 'One weird trick'; 224x224")
def alexnet(scale: Scale) -> Sample:
    thin, size, classes, hidden = (16, 96, 10, 32) if scale == "tiny" else (1, 224, 1000, 4096)
    a, b, c, d = (channels // thin for channels in (64, 192, 384, 256))
    convs = nn.Sequential(
        nn.Conv2d(3, a, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(a, b, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(b, c, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(c, d, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(d, d, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6),
    )
    count = 4 if scale == "tiny" else 1
    return _alexnet(convs, 36 * d, hidden, classes), class_loss, images(count, size, classes)


@_shelf.add("two columns as groups and local response normalisation, as in 2012; 227x227")
def alexnet_2012(scale: Scale) -> Sample:
    thin, size, classes, hidden = (16, 99, 10, 32) if scale == "tiny" else (1, 227, 1000, 4096)
    a, b, c, d = (channels // thin for channels in (96, 256, 384, 256))
    convs = nn.Sequential(
        nn.Conv2d(3, a, 11, stride=4),
        nn.ReLU(inplace=True),
        nn.LocalResponseNorm(5, alpha=5e-4, k=2.0),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(a, b, 5, padding=2, groups=2),
        nn.ReLU(inplace=True),
        nn.LocalResponseNorm(5, alpha=5e-4, k=2.0),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(b, c, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(c, c, 3, padding=1, groups=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(c, d, 3, padding=1, groups=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
    )
    count, features = (4, 4 * d) if scale == "tiny" else (1, 36 * d)
    return _alexnet(convs, features, hidden, classes), class_loss, images(count, size, classes)


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times the width.

    The stride sits on the first 1x1, as published (on the 3x3 it is 23.0 GFLOP, not 22.6).
    """

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.conv1 = nn.Conv2d(inner, width, 1, stride, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outer, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        result: Tensor = self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))
        return result


@_shelf.add("bottlenecks 3, 8, 36, 3, as in He 2015; 224x224")
def resnet152(scale: Scale) -> Sample:
    if scale == "tiny":
        depths, stem, classes, size, count = (1, 2, 3, 1), 4, 10, 32, 2
    else:
        depths, stem, classes, size, count = (3, 8, 36, 3), 64, 1000, 224, 1
    stages: list[nn.Module] = []
    inner = stem
    for stage, depth in enumerate(depths):
        width = stem << stage
        blocks: list[nn.Module] = []
        for index in range(depth):
            blocks.append(Bottleneck(inner, width, 2 if stage and not index else 1))
            inner = 4 * width
        stages.append(nn.Sequential(*blocks))
    model = nn.Sequential(
        nn.Conv2d(3, stem, 7, 2, 3, bias=False),
        nn.BatchNorm2d(stem),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(inner, classes),
    )
    return model, class_loss, images(count, size, classes)


CASES = _shelf.cases
