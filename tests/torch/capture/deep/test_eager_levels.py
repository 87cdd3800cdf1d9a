"""The memory of an eager step, measured on a few blocks of the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from steelyard.capture.deep import eager_levels as tested
from steelyard.capture.deep.eager_levels import EagerLevels, eager_levels
from steelyard.capture.deep.truncate import cut

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 8,
    "num_attention_heads": 4, "vocab_size": 200, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "gpt": transformers.GPTNeoXConfig(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "mixtral": transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
    "t5": transformers.T5Config(
        d_model=64, d_kv=16, d_ff=160, num_layers=7, num_decoder_layers=8, num_heads=4,
        vocab_size=200, decoder_start_token_id=0,
    ),
}  # fmt: skip


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    value: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return value


def built(name: str) -> nn.Module:
    config = CONFIGS[name]
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = kind.from_config(config)
    return model.train()


def highest(levels: EagerLevels) -> tuple[int, int, int, int]:
    return (
        max(level.nbytes for level in levels.passes),
        max(level.nbytes - level.gradient_bytes for level in levels.passes),
        max(level.nbytes for level in levels.update),
        levels.state_bytes,
    )


@pytest.mark.parametrize("shape", [(1, 8), (8, 64)], ids=["weights", "activations"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in ("t5", "mixtral", "qwen3") else name
        for name in CONFIGS
    ],
)
def test_three_blocks_say_what_all_blocks_say(
    name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = built(name), torch.empty(*shape, dtype=torch.long, device="meta")
    assert cut(model) is not None
    few = eager_levels(model, loss_of, ids, ADAMW, on_gpu=True)
    few_recomputed = eager_levels(model, loss_of, ids, None, recomputes=True)
    monkeypatch.setattr(tested, "cut", lambda _: None)
    assert highest(few) == highest(eager_levels(model, loss_of, ids, ADAMW, on_gpu=True))
    all_recomputed = eager_levels(model, loss_of, ids, None, recomputes=True)
    most = max(level.nbytes for level in few_recomputed.passes)
    assert most == max(level.nbytes for level in all_recomputed.passes)


def test_the_model_is_left_as_it_was() -> None:
    model, ids = built("llama"), torch.empty(2, 8, dtype=torch.long, device="meta")
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    eager_levels(model, loss_of, ids, ADAMW, recomputes=True)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys(), name
    assert all(p.device.type == "meta" and p.grad is None for p in model.parameters())


def test_frozen_weights_get_no_gradient_and_no_state() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    model[0].requires_grad_(False)
    levels = eager_levels(model, lambda m, x: m(x).mean(), torch.randn(4, 64), ADAMW)
    assert max(level.gradient_bytes for level in levels.update) == (64 * 8 + 8) * 4
    # Two moments, and one step count for each of weight and bias.
    assert levels.state_bytes == 2 * (64 * 8 + 8) * 4 + 2 * 4
