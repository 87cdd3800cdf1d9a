"""FLOPs of operators that torch's registry lacks or counts wrongly, compared with other counts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from steelyard.capture.deep.batch_template import TruncatedStep
from steelyard.capture.step import CapturedStep
from steelyard.ir.graph import Graph
from steelyard.operators.flops import flops_of_call, format_of_call

aten = torch.ops.aten
COUNT, ROWS, INNER, WIDTH = 4, 64, 16, 8


def counted(target: Any, *args: Any, **kwargs: Any) -> int:
    return flops_of_call(target, args, kwargs, target(*args, **kwargs))


def one_by_one(pairs: Any) -> int:
    """Return the FLOPs of the products of a group, one after another, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        for a, b in pairs:
            torch.mm(a, b)
    return int(counter.get_total_flops())


@st.composite
def offsets(draw: Any) -> torch.Tensor:
    """Draw any partition of the rows, also with empty groups."""
    cuts = draw(st.lists(st.integers(0, ROWS), min_size=COUNT - 1, max_size=COUNT - 1))
    return torch.tensor([*sorted(cuts), ROWS], dtype=torch.int32)


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


@given(offs=offsets())
@settings(deadline=None, max_examples=20)
def test_flops_of_a_grouped_product_are_independent_of_its_offsets(
    offs: torch.Tensor,
) -> None:
    parts = list(pairwise([0, *offs.tolist()]))
    rows, experts = half(ROWS, INNER), half(COUNT, INNER, WIDTH)
    assert counted(aten._grouped_mm.default, rows, experts, offs) == one_by_one(
        (rows[a:b], expert) for (a, b), expert in zip(parts, experts, strict=True)
    )
    left, columns = half(COUNT, WIDTH, INNER), half(INNER, ROWS)
    assert counted(aten._grouped_mm.default, left, columns, offs) == one_by_one(
        (matrix, columns[:, a:b]) for (a, b), matrix in zip(parts, left, strict=True)
    )
    gradients = half(ROWS, WIDTH)
    assert counted(aten._grouped_mm.default, rows.t(), gradients, offs) == one_by_one(
        (rows[a:b].t(), gradients[a:b]) for a, b in parts
    )
    assert counted(aten._grouped_mm.default, left, experts) == one_by_one(zip(left, experts))


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.Conv2d(8, 16, 3),
        torch.nn.Conv2d(8, 8, 3, groups=8),
        torch.nn.Conv2d(8, 16, 3, groups=4, stride=2),
        torch.nn.ConvTranspose2d(8, 16, 3, groups=2, stride=2),
        torch.nn.Conv3d(8, 8, 3, groups=8, padding=1),
        torch.nn.ConvTranspose1d(8, 4, 3),
    ],
    ids=str,
)
def test_each_gradient_of_a_convolution_has_the_flops_of_the_forward_pass(layer: Any) -> None:
    dims = layer.weight.dim() - 2
    x = torch.randn(2, 8, *(7,) * dims)
    graph = captured(layer, x, trains_input=True)
    flops = {node.op: node.flops for node in graph.nodes if node.flops}
    forward = flops.pop("aten.convolution.default")
    assert list(flops.values()) == [2 * forward]
    y = layer(x)
    places = x if layer.transposed else y
    assert forward == 2 * places[:, 0].numel() * layer.weight.numel()


def captured(layer: torch.nn.Module, x: torch.Tensor, *, trains_input: bool) -> Graph:
    class Shifted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            self.shift = torch.nn.Parameter(torch.zeros(x.shape), requires_grad=trains_input)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x + self.shift)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> Any:
        return model(x).square().mean()

    return CapturedStep(model=Shifted(), loss=loss, batch=x).captured().graph


def test_products_of_vectors_and_packed_or_complex_matrices_are_counted() -> None:
    x, w, v = torch.ones(4, 8), torch.ones(8, 6), torch.ones(8)
    assert counted(aten.mv.default, w.t(), v) == 2 * 6 * 8
    assert counted(aten.dot.default, v, v) == 2 * 8
    assert counted(aten.addmv.default, torch.ones(6), w.t(), v) == 2 * 6 * 8
    assert counted(aten.linear.default, x, w.t()) == 2 * 4 * 8 * 6
    bytes_ = torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)
    assert counted(aten._int_mm.default, *bytes_) == 2 * 32 * 16 * 8
    z = torch.ones(4, 8, dtype=torch.complex64)
    assert counted(aten.mm.default, z, z.t()) == 4 * 2 * 4 * 8 * 4


def test_a_recurrent_layer_in_one_call_counts_its_matrices_at_each_step() -> None:
    x = torch.empty(5, 3, 8)
    weights = [torch.empty(64, 8), torch.empty(64, 16), torch.empty(64), torch.empty(64)]
    expected = 2 * 5 * 3 * 64 * (8 + 16)
    assert flops_of_call(aten._cudnn_rnn.default, (x, weights), {}, None) == expected
    assert flops_of_call(aten._cudnn_rnn_backward.default, (x, weights), {}, None) == 2 * expected


def test_products_are_priced_in_the_format_of_their_operands() -> None:
    a = torch.ones(32, 16).to(torch.float8_e4m3fn)
    assert format_of_call((a, a.t())) == "float8"
    assert format_of_call((torch.ones(2, 2, dtype=torch.int8),)) == "int8"
    assert format_of_call(([torch.ones(2, dtype=torch.complex64)],)) == "float32"


# --- a mixture of experts, compared with the closed form

LENGTH = 128


def experts_of(config: Any) -> int:
    """Return the number of parameters with which each token is multiplied, in all layers."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    attention = 2 * hidden**2 + 2 * hidden * (hidden // heads) * config.num_key_value_heads
    router = hidden * config.num_local_experts
    experts = config.num_experts_per_tok * 3 * hidden * config.intermediate_size
    return int(config.num_hidden_layers * (attention + router + experts))


def closed_form(config: Any, length: int) -> float:
    """Return the FLOPs per token: 6 for each active parameter, and attention, whose scores are
    recomputed in the backward pass: 2 products forward and 5 backward of ``2 * length *
    hidden_size``."""
    attention = 7 * 2 * length * config.hidden_size * config.num_hidden_layers
    return 6 * (experts_of(config) + config.hidden_size * config.vocab_size) + attention


def loss_of(model: Any, ids: torch.Tensor) -> Any:
    return model(ids, labels=ids, use_cache=False).loss


def mixtral(**sizes: int) -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    return model.to(torch.bfloat16)


def test_mixtral_counts_the_work_of_its_active_parameters() -> None:
    """The default configuration, 8x7B, has 32 layers, three of which are captured."""
    model = mixtral()
    ids = torch.zeros(256, 4096, dtype=torch.long)
    step = TruncatedStep(model=model, loss=loss_of, batch=ids, optimizer=None)
    assert step.blocks.count == 32
    graph, tokens = step.whole.graph, step.whole.samples * 4096
    block = sum(n.flops for n in graph.nodes if n.path.startswith("model.layers.1."))
    around = sum(n.flops for n in graph.nodes if not n.path.startswith("model.layers."))
    each = (32 * block + around) / tokens
    assert each == pytest.approx(closed_form(model.config, 4096), rel=0.01)
    assert each > 80e9
    assert not any(node.is_uncounted for node in graph.nodes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_small_mixture_of_experts_on_this_machine_counts_the_same(dtype: torch.dtype) -> None:
    """In float32, transformers calls an operator of its own."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    }  # fmt: skip
    model = mixtral(**sizes).to_empty(device="cpu").to(dtype)
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    graph = CapturedStep(model=model, loss=loss_of, batch=ids).captured().graph
    each = graph.flops / ids.numel()
    assert each == pytest.approx(closed_form(model.config, LENGTH), rel=0.01)
    assert not any(node.is_uncounted for node in graph.nodes)
