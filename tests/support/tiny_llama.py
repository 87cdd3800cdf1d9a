"""A tiny Llama and its data, trained in the loops of several libraries.

Not for comparing a captured step with eager PyTorch: see zoo/.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = 256
# Between the 2.3 MiB that a plan needs and the 4.6 MiB of eager PyTorch, in batches of 8.
BUDGET = "3000 KiB"
BUDGET_BYTES = 3000 * 1024


def tiny_llama() -> LlamaForCausalLM:
    """Return the same weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def sentences(count: int = 32, length: int = 32) -> list[dict[str, Tensor]]:
    """Return samples of one length, with unequally many targets that count."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        words = torch.randint(WORDS - 2, (length,), generator=generator)
        labels = words.clone()
        labels[: number % 9] = -100
        found.append({"input_ids": words, "labels": labels})
    return found


def loss(model: nn.Module, batch: Any) -> Tensor:
    value: Tensor = model(**batch).loss
    return value


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    """Compare all weights. Micro-batches round, and AdamW amplifies that by a little."""
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(right[name], tensor, rtol=0, atol=2e-6, msg=name)


def largest_change(model: nn.Module) -> float:
    """Return the largest change of a weight since ``tiny_llama`` made the model."""
    pairs = zip(model.parameters(), tiny_llama().parameters(), strict=True)
    return max(float((now.detach() - first.detach()).abs().max()) for now, first in pairs)
