"""A deep model planned from three of its blocks equals the whole trace, or is not truncated at
all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from steelyard.capture.deep.truncate import cut
from steelyard.capture.step import CapturedStep
from steelyard.ir.graph import Graph, OutputKind
from steelyard.ir.program import Program
from steelyard.predict import predict
from tests.support.stepping import COSTS, source_of
from tests.zoo import Sample
from tests.zoo.case import next_token_loss, square_loss, tokens
from tests.zoo.hf import _RECIPES, ModelLoss
from tests.zoo.own import GPT

LAYERS = 8
# The fewest layers that are cut, for models that take long to trace whole.
FEWEST = 6
on_one_worker = pytest.mark.xdist_group("deep")


def hf(name: str, **config: Any) -> Sample:
    recipe = _RECIPES[name]
    return replace(recipe, tiny={**recipe.tiny, **config}).build("tiny")


def gpt(layers: int = LAYERS) -> Sample:
    model = GPT(layers=layers, width=32, heads=2, vocabulary=64, length=16)
    return model, next_token_loss, tokens(4, 16, 64)


class FirstDiffers(nn.Module):
    """A wider first block, then a run of equal ones, then a second run of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ModuleList(
            nn.Sequential(
                nn.Linear(8, 16 if i == 0 else 12), nn.GELU(), nn.Linear(16 if i == 0 else 12, 8)
            )
            for i in range(LAYERS)
        )
        self.tower = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(7))
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stem:
            x = x + block(x)
        result: Tensor = self.tower(x)
        return result


def first_differs() -> Sample:
    return FirstDiffers(), square_loss, {"x": torch.randn(4, 8)}


def encoder_decoder() -> Sample:
    return hf("bart", encoder_layers=LAYERS, decoder_layers=LAYERS - 1)


def with_adapters() -> Sample:
    """A Llama with LoRA: the backward pass ends in the first block, which is not in the run."""
    model, loss, batch = hf("llama", num_hidden_layers=FEWEST)
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, config), loss, batch


CUT: dict[str, tuple[Callable[[], Sample], dict[str, tuple[int, int]]]] = {
    "gpt": (gpt, {"blocks": (0, LAYERS)}),
    "llama": (
        lambda: hf("llama", num_hidden_layers=FEWEST),
        {"model.layers": (0, FEWEST)},
    ),
    "bert": (
        lambda: hf("bert", num_hidden_layers=FEWEST),
        {"bert.encoder.layer": (0, FEWEST)},
    ),
    "vit": (lambda: hf("vit", num_hidden_layers=FEWEST), {"vit.layers": (0, FEWEST)}),
    "lora": (with_adapters, {"base_model.model.model.layers": (0, FEWEST)}),
}


@cache
def sources(name: str) -> tuple[CapturedStep, CapturedStep]:
    """Return sources for a whole trace and for planning; each is captured once for all tests."""
    sample = CUT[name][0]()
    return source_of(sample), source_of(sample, for_planning=True)


def shape_of(graph: Graph) -> dict[str, Any]:
    prediction = predict(Program.plain(graph), COSTS)
    return {
        "nodes": len(graph.nodes),
        "flops": graph.flops,
        "moved": sum(n.moved_bytes for n in graph.nodes),
        "fingerprint": graph.fingerprint,
        "model": graph.model_fingerprint,
        "peak": prediction.peak.nbytes,
        "resident": prediction.peak.resident_bytes,
        "seconds": round(prediction.metrics.computation_seconds.value, 9),
        "gradients": sorted(o.target for o in graph.outputs if o.kind is OutputKind.GRADIENT),
        "updates": sorted(o.target for o in graph.outputs if o.kind is OutputKind.UPDATE),
        "unused": sorted(graph.unused),
        "runs": sorted((r.prefix, r.first, r.count) for r in graph.runs),
        "signatures": sorted(n.signature for n in graph.nodes),
    }


@on_one_worker
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", CUT)
def test_a_graph_expanded_from_three_blocks_equals_the_full_trace(name: str) -> None:
    _, stretches = CUT[name]
    whole, planned = (source.captured() for source in sources(name))
    assert planned.is_grown
    assert not whole.is_grown
    assert planned.graph.problems() == []
    expected, actual = shape_of(whole.graph), shape_of(planned.graph)
    # A whole trace may find more runs inside others; the grown runs must be among them.
    assert set(actual["runs"]) <= {*expected["runs"], *((p, *s) for p, s in stretches.items())}
    grown = {r.prefix: (r.first, r.count) for r in planned.graph.runs}
    assert {p: grown.get(p) for p in stretches} == stretches
    for what in expected.keys() - {"runs"}:
        assert actual[what] == expected[what], what


@on_one_worker
def test_each_node_of_an_expanded_graph_belongs_to_its_block() -> None:
    whole, grown = (source.captured().graph for source in sources("gpt"))

    def per_module(graph: Graph) -> dict[str, int]:
        count: dict[str, int] = {}
        for node in graph.nodes:
            count[node.path] = count.get(node.path, 0) + 1
        return count

    assert per_module(grown) == per_module(whole)


@on_one_worker
def test_the_eager_peak_of_a_deep_model_is_extrapolated_to_the_byte() -> None:
    for name in ("gpt", "llama"):
        whole, planned = (source.twin() for source in sources(name))
        assert planned == whole


def test_truncating_leaves_the_users_model_unchanged() -> None:
    model, _, _ = gpt()
    blocks = list(model.blocks)
    shortened = cut(model)
    assert shortened is not None
    assert len(shortened.model.get_submodule("blocks")._modules) == 3
    assert list(model.blocks) == blocks
    assert len(model.blocks) == LAYERS
    kept = {id(p) for p in shortened.model.parameters()}
    assert kept < {id(p) for p in model.parameters()}


@on_one_worker
def test_a_step_to_be_run_is_traced_in_full() -> None:
    _, source = sources("gpt")
    assert source.captured().is_grown
    assert not source.whole().captured().is_grown


# --- blocks that look equal but are not -----------------------------------------------------------


class Layer(nn.Module):
    """A block of equal class and shapes, whose behaviour may depend on its index."""

    def __init__(self, index: int, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer_idx = index
        self.__dict__.update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class OddShifts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x.roll(1, 1) if self.layer_idx % 2 else x)


class LateIsLarge(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.layer_idx == 4:
            y = torch.cat([y, y.exp(), y.sigmoid()], 1)[:, :8]
        return x + y


class DividedByIndex(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) / (self.layer_idx + 1)


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class SpecialByCount(Stack):
    """A model whose loop, but not its block, knows which block is special."""

    def __init__(self, special: int) -> None:
        super().__init__([Layer(i) for i in range(LAYERS)])
        self.special = special

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == self.special:
                x = torch.cat([x, x.exp(), x.sigmoid()], 1)[:, :8]
        return x


class SpecialByLength(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == len(self.blocks) // 2:
                x = torch.cat([x, x.exp(), x.sigmoid()], 1)[:, :8]
        return x


class EverySecond(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[::2]:
            x = block(x)
        return x


class SkipAhead(Stack):
    """A model in which each block also reads the result of the block two before it."""

    def forward(self, x: Tensor) -> Tensor:
        before, now = x, x
        for block in self.blocks:
            before, now = now, block(now) + before
        return now


class Collected(Stack):
    """A model that joins all intermediate results, as dense prediction heads and probes do."""

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for block in self.blocks:
            seen.append(block(seen[-1]))
        return torch.stack(seen).mean(0)


class Reversed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class TakenApart(Stack):
    """A U-Net of equal blocks: the k-th from the end reads the k-th from the start."""

    def forward(self, x: Tensor) -> Tensor:
        half = len(self.blocks) // 2
        seen = []
        for block in self.blocks[:half]:
            x = block(x)
            seen.append(x)
        for block in self.blocks[half:]:
            x = block(x + seen.pop())
        return x


class LastOnly(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        return x + self.blocks[-1](x.detach())


class ByTable(Stack):
    def __init__(self) -> None:
        super().__init__([Layer(i) for i in range(LAYERS)])
        self.scale = {i: 1.0 + (i == 3) for i in range(LAYERS)}

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.scale[index] > 1:
                x = torch.cat([x, x.exp(), x.sigmoid()], 1)[:, :8]
        return x


class SpecialParameter(Stack):
    """A model whose list beside the blocks holds a different setting for each block."""

    def __init__(self) -> None:
        super().__init__([Layer(i) for i in range(LAYERS)])
        self.extra = nn.ModuleList(
            nn.Linear(8, 8) if i == 4 else nn.Identity() for i in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block, extra in zip(self.blocks, self.extra, strict=True):
            x = extra(block(x))
        return x


def squares(model: nn.Module) -> Sample:
    return model, square_loss, {"x": torch.randn(4, 8)}


def stochastic_depth() -> nn.Module:
    """Return a model with one rate for each layer, as in drop path."""

    class Dropped(Layer):
        def forward(self, x: Tensor) -> Tensor:
            keep = torch.rand(x.shape[0], 1) > self.rate
            return x + self.layer(x) * keep

    return Stack([Dropped(i, rate=0.1 * i / LAYERS) for i in range(LAYERS)])


def dropouts(rates: list[float]) -> nn.Module:
    return Stack([nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for rate in rates])


def one_frozen() -> nn.Module:
    model = Stack([Layer(i) for i in range(LAYERS)])
    model.blocks[3].requires_grad_(False)
    return model


def one_in_eval() -> nn.Module:
    model = Stack([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(LAYERS)])
    model.blocks[4].eval()
    return model


def one_hooked() -> nn.Module:
    model = Stack([Layer(i) for i in range(LAYERS)])
    model.blocks[4].register_forward_hook(lambda module, inputs, output: output.exp())
    return model


def two_share() -> nn.Module:
    """Return a model whose fifth block is its first one, so that both train the same weights."""
    blocks: list[nn.Module] = [Layer(i) for i in range(LAYERS)]
    blocks[4] = blocks[0]
    return Stack(blocks)


def two_share_a_weight() -> nn.Module:
    model = Stack([Layer(0) for _ in range(LAYERS)])
    model.blocks[4].layer.weight = model.blocks[1].layer.weight
    return model


def one_other_function() -> nn.Module:
    return Stack([Layer(0, act=torch.exp if i == 4 else torch.tanh) for i in range(LAYERS)])


def alternating(kind: str) -> Sample:
    types = ["sliding_attention", "full_attention"] * (FEWEST // 2)
    return hf(kind, num_hidden_layers=FEWEST, layer_types=types)


UNLIKE: dict[str, Callable[[], Sample]] = {
    "gemma3 alternating": lambda: alternating("gemma3"),
    "gemma2 as it comes": lambda: hf("gemma2", num_hidden_layers=FEWEST),
    "qwen2 layer types": lambda: hf(
        "qwen2",
        num_hidden_layers=FEWEST,
        layer_types=["full_attention"] * 3 + ["sliding_attention"] * 3,
        sliding_window=8,
        use_sliding_window=True,
    ),
    "gpt2 scaled by the inverse of the index": lambda: hf(
        "gpt2", n_layer=FEWEST, scale_attn_by_inverse_layer_idx=True
    ),
    "convnext drop path": lambda: hf("convnext", depths=[FEWEST, 1], drop_path_rate=0.3),
    "beit drop path": lambda: hf("beit", num_hidden_layers=FEWEST, drop_path_rate=0.3),
    "swin": lambda: hf("swin", depths=[FEWEST, 1], drop_path_rate=0.0),
    "modernbert global every third": lambda: hf(
        "modernbert", num_hidden_layers=FEWEST, global_attn_every_n_layers=3
    ),
    "odd blocks shift": lambda: squares(Stack([OddShifts(i) for i in range(LAYERS)])),
    "the fifth block is larger": lambda: squares(Stack([LateIsLarge(i) for i in range(LAYERS)])),
    "divided by the index": lambda: squares(Stack([DividedByIndex(i) for i in range(LAYERS)])),
    "the loop treats block 4 apart": lambda: squares(SpecialByCount(4)),
    "the loop treats block 2 apart": lambda: squares(SpecialByCount(2)),
    "the loop treats the middle apart": lambda: squares(
        SpecialByLength([Layer(i) for i in range(LAYERS)])
    ),
    "every second block": lambda: squares(EverySecond([Layer(i) for i in range(LAYERS)])),
    "skip connections": lambda: squares(SkipAhead([Layer(i) for i in range(LAYERS)])),
    "all results are collected": lambda: squares(Collected([Layer(i) for i in range(LAYERS)])),
    "in reverse": lambda: squares(Reversed([Layer(i) for i in range(LAYERS)])),
    "first half feeds second half": lambda: squares(TakenApart([Layer(i) for i in range(LAYERS)])),
    "the last block apart": lambda: squares(LastOnly([Layer(i) for i in range(LAYERS)])),
    "a table beside the blocks": lambda: squares(ByTable()),
    "a list beside the blocks": lambda: squares(SpecialParameter()),
    "stochastic depth": lambda: squares(stochastic_depth()),
    "one dropout differs": lambda: squares(dropouts([0.1] * 4 + [0.2] + [0.1] * 3)),
    "one dropout is off": lambda: squares(dropouts([0.1] * 4 + [0.0] + [0.1] * 3)),
    "rising dropout": lambda: squares(dropouts([0.1 * i for i in range(LAYERS)])),
    "one block frozen": lambda: squares(one_frozen()),
    "one block in eval": lambda: squares(one_in_eval()),
    "one block hooked": lambda: squares(one_hooked()),
    "a block used twice": lambda: squares(two_share()),
    "a weight shared by two": lambda: squares(two_share_a_weight()),
    "another function in one": lambda: squares(one_other_function()),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_blocks_that_only_look_alike_are_traced_in_full(name: str) -> None:
    """If such a model is ever expanded from three blocks, it must equal the whole trace."""
    sample = UNLIKE[name]()
    planned = source_of(sample, for_planning=True).captured()
    if not planned.is_grown:
        return  # the graph is the whole trace
    whole = source_of(sample).captured().graph
    expected, actual = shape_of(whole), shape_of(planned.graph)
    for what in ("fingerprint", "nodes", "flops", "peak", "resident", "gradients", "signatures"):
        assert actual[what] == expected[what], what


def test_seventy_billion_parameters_are_planned_from_three_blocks_without_memory() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.zeros(1, 4096, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids.clone()}
    source = source_of((model, ModelLoss({"use_cache": False}), batch), for_planning=True)
    captured = source.captured()
    graph = captured.graph
    assert captured.is_grown
    assert {(r.prefix, r.count) for r in graph.runs} >= {("model.layers", 80)}
    trained = [o.target for o in graph.outputs if o.kind is OutputKind.GRADIENT]
    assert sorted(trained) == sorted(f"parameter:{n}" for n, _ in model.named_parameters())
    # Six FLOPs for each matrix element and token (one product forward, two backward), and
    # attention.
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1) - 128256 * 8192
    attention = 80 * 2 * 2 * 4096 * 4096 * 8192
    assert graph.flops == pytest.approx(6 * matrices * 4096 + 3.5 * attention, rel=0.01)
    assert all(p.device.type == "meta" for p in model.parameters())
