"""Six small models of different kinds for live.py; a step of each takes 20 to 200 ms on a core.

Their weights and batches are random.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.ranks import Perceptron
from tests.zoo.case import class_loss, next_token_loss, tokens
from tests.zoo.hf import ModelLoss
from tests.zoo.own import GPT, Residual


def _gpt() -> Any:
    model = GPT(
        layers=4, width=128, heads=4, vocabulary=512, length=64, dropout=0.0, fused=True
    )  # fmt: skip
    return model, next_token_loss, tokens(16, 64, 512)


def _transformer(kind: str, count: int, **shape: Any) -> Any:
    """Return a model of the transformers library with random weights, its loss and a batch."""
    import transformers

    transformers.logging.set_verbosity_error()
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(num_attention_heads=4, **shape))
    if "image_size" in shape:
        side, labels = shape["image_size"], shape["num_labels"]
        batch = {
            "pixel_values": torch.randn(count, 3, side, side),
            "labels": torch.randint(0, labels, (count,)),
        }
        return model, ModelLoss({}), batch
    ids = torch.randint(3, shape["vocab_size"], (count, shape["max_position_embeddings"]))
    return model, ModelLoss({}), {"input_ids": ids, "labels": ids.clone()}


def _resnet() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        *(nn.Sequential(Residual(i, o, s), Residual(o, o, 1)) for i, o, s in _STAGES),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return model, class_loss, {"x": torch.randn(32, 3, 32, 32), "y": torch.randint(0, 10, (32,))}


_STAGES = ((16, 16, 1), (16, 32, 2), (32, 64, 2))


def _perceptron() -> Any:
    """Return a model with many weights and little computation for each."""
    x, y = torch.randn(2, 256, 512)
    return Perceptron(4, 512), _squares, {"x": x, "y": y}


def _squares(model: nn.Module, batch: Any) -> Tensor:
    result: Tensor = (model(batch["x"]) - batch["y"]).square().mean()
    return result


_SMALL = {"hidden_size": 128, "num_hidden_layers": 4}
_WORDS = {**_SMALL, "vocab_size": 512, "max_position_embeddings": 64}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt": _gpt,
    "llama": partial(
        _transformer, "LlamaForCausalLM", 16, intermediate_size=344, use_cache=False, **_WORDS
    ),
    "bert": partial(_transformer, "BertForMaskedLM", 16, intermediate_size=512, **_WORDS),
    "vit": partial(
        _transformer, "ViTForImageClassification", 16, intermediate_size=512, image_size=32,
        patch_size=4, num_labels=10, **_SMALL,
    ),
    "resnet": _resnet,
    "perceptron": _perceptron,
}  # fmt: skip
