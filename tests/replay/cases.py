"""The plans that are recorded, and how each is made again.

Models of the zoo under a few memory budgets on one rank, on several ranks, and on declared
clusters. Nothing is measured: see costs.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import steelyard as sy
from steelyard.errors import SteelyardError
from tests import zoo
from tests.replay.costs import fixed_costs, this_machine
from tests.zoo.case import next_token_loss
from tests.zoo.own import GPT

RECORDS = Path(__file__).parent / "records"
_ADAM = partial(torch.optim.AdamW, lr=1e-3)
# Shares of what eager PyTorch holds besides weights, gradients and the state of the optimizer.
_SHARES = {"roomy": 0.9, "tight": 0.6, "tightest": 0.35}
_ONE_RANK = (
    "gpt", "moe", "mlp", "resnet_bn", "hf_gpt2", "hf_llama", "hf_bert", "hf_t5", "hf_vit",
    "hf_mixtral", "hf_whisper", "hf_mamba",
)  # fmt: skip
_SEVERAL_RANKS = (("gpt", 2), ("hf_llama", 2), ("hf_t5", 4), ("resnet_bn", 2))
# Longer lists in the predictions are recorded by their length and a digest, as are lists of rules:
# those of the plan itself stand in its file.
_MOST_ITEMS, _MOST_RULES = 24, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """``plan`` is the plan file, or why planning was refused; ``predictions`` is what stands beside
    it, long lists digested."""

    name: str
    plan: str
    predictions: str

    def files(self) -> dict[str, str]:
        found = {f"{self.name}.plan.toml" if self.predictions else f"{self.name}.txt": self.plan}
        return found | ({f"{self.name}.plan.json": self.predictions} if self.predictions else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``make`` writes into a folder, and gives what is recorded."""

    name: str
    make: Callable[[Path], Iterator[Recorded]]


def cases() -> Iterator[Case]:
    for model in _ONE_RANK:
        yield Case(name=model, make=partial(_one_rank, model))
    for model, ranks in _SEVERAL_RANKS:
        yield Case(name=f"{model}-{ranks}-ranks", make=partial(_several_ranks, model, ranks))
    for name in _DECLARED:
        yield Case(name=name, make=partial(_declared, name))


def _one_rank(model: str, folder: Path) -> Iterator[Recorded]:
    step = zoo.case(model).make()
    with fixed_costs():
        eager = sy.plan(*step, optimizer=_ADAM, cluster=this_machine())
    # Weights, gradients and two values of AdamW for each.
    stays = 4 * sum(p.numel() * p.element_size() for p in step[0].parameters())
    for name, share in _SHARES.items():
        room = float(eager.baseline.memory_bytes) - stays
        budget = sy.Budget(memory=stays + int(share * room))
        yield _recorded(f"{model}-{name}", folder, step, budget=budget, cluster=this_machine())


def _several_ranks(model: str, ranks: int, folder: Path) -> Iterator[Recorded]:
    step, name = zoo.case(model).make(), f"{model}-{ranks}-ranks"
    yield _recorded(name, folder, step, cluster=this_machine(ranks))


def _declared(name: str, folder: Path) -> Iterator[Recorded]:
    step, asked = _DECLARED[name]
    yield _recorded(name, folder, step(), **asked)


def _deep_gpt() -> zoo.Sample:
    with torch.device("meta"):
        model = GPT(layers=24, width=1024, heads=16, vocabulary=32000, length=512, dropout=0.0)
    tokens = {key: torch.zeros(64, 512, dtype=torch.long) for key in ("x", "y")}
    return model, next_token_loss, tokens


def _llama_8b() -> zoo.Sample:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)

    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch).logits[:, :-1].flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    return model, loss, torch.zeros(64, 4096, dtype=torch.long)


_DECLARED: dict[str, tuple[Callable[[], zoo.Sample], dict[str, Any]]] = {
    "deep-gpt-on-a100": (_deep_gpt, {"cluster": sy.Cluster.named("dgx-a100")}),
    "llama-8b-on-h100": (_llama_8b, {"cluster": sy.Cluster.named("dgx-h100")}),
    "llama-8b-in-30gib": (
        _llama_8b,
        {"cluster": sy.Cluster.named("dgx-h100"), "budget": sy.Budget(memory="30 GiB")},
    ),
    "moe-on-a100": (lambda: zoo.case("moe").make(), {"cluster": sy.Cluster.named("dgx-a100")}),
}


def _recorded(name: str, folder: Path, step: zoo.Sample, **asked: Any) -> Recorded:
    path = folder / f"{name}.plan.toml"
    try:
        with fixed_costs():
            planned = sy.plan(*step, optimizer=_ADAM, title=name, **asked)
    except SteelyardError as refused:
        return Recorded(name=name, plan=f"{refused}\n", predictions="")
    planned.save(path)
    said = json.loads(path.with_name(f"{name}.plan.json").read_text("utf-8"))
    predictions = json.dumps(_short(said), indent=1, ensure_ascii=False)
    return Recorded(name=name, plan=path.read_text("utf-8"), predictions=f"{predictions}\n")


def _short(said: Any, *, most: int = _MOST_ITEMS) -> Any:
    """The same, long lists by their digests: timelines of a thousand operators."""
    if isinstance(said, dict):
        return {
            key: _short(value, most=_MOST_RULES if key == "rules" else _MOST_ITEMS)
            for key, value in said.items()
        }
    if not isinstance(said, list):
        return said
    if len(said) > most:
        digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
        return {"count": len(said), "sha256": digest}
    return [_short(value) for value in said]
