"""Checks gradient accumulation under bf16 autocast: rounding that AdamW amplifies, or an error?

    python benchmarks/half_precision.py

Trains a small GPT-2 for three steps on the whole batch and on 2, 4 and 8 micro-batches, with and
without autocast, and compares each with the same training in float64. All of it is plain PyTorch.
A test shows that Steelyard's micro-batches equal plain PyTorch's to the bit
(tests/torch/run/test_step.py).
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

PARTS, STEPS = (1, 2, 4, 8), 3


def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=512, n_positions=64, n_embd=128, n_layer=4, n_head=4, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def batch(step: int) -> torch.Tensor:
    return torch.randint(512, (8, 64), generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, ids: torch.Tensor, *, parts: int, autocast: bool) -> None:
    model.zero_grad()
    for part in ids.chunk(parts):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=part, labels=part, use_cache=False).loss
        (loss / parts).backward()


def gradient(model: nn.Module, *, parts: int, autocast: bool) -> torch.Tensor:
    backward(model, batch(0), parts=parts, autocast=autocast)
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def trained(
    model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], *, parts: int, autocast: bool
) -> torch.Tensor:
    optimizer = make(model.parameters())
    for step in range(STEPS):
        backward(model, batch(step), parts=parts, autocast=autocast)
        optimizer.step()
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def main() -> None:
    gradients, weights = [], []
    exact = gradient(model().double(), parts=1, autocast=False)
    for autocast in (False, True):
        found = {k: gradient(model(), parts=k, autocast=autocast) for k in PARTS}
        for parts, ours in found.items():
            row = {
                "autocast": autocast,
                "parts": parts,
                "gradient_from_float64": float((ours - exact).norm() / exact.norm()),
                "gradient_from_whole_batch": float((ours - found[1]).norm() / exact.norm()),
            }
            gradients.append(row)
    for name, make in {
        "AdamW": partial(torch.optim.AdamW, lr=1e-3),
        "SGD": partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
    }.items():
        exact = trained(model().double(), make, parts=1, autocast=False)
        reached = {k: trained(model(), make, parts=k, autocast=True) for k in PARTS}
        for parts, ours in reached.items():
            row = {
                "optimizer": name,
                "parts": parts,
                "largest_from_float64": float((ours - exact).abs().max()),
                "largest_from_whole_batch": float((ours - reached[1]).abs().max()),
            }
            weights.append(row)
    print(json.dumps({"gradients": gradients, "weights": weights}))


if __name__ == "__main__":
    main()
