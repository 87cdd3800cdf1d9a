"""A graph derived for fewer samples equals a capture of as many samples, or there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.batch.derived_graph import are_equal, with_samples
from steelyard.capture.step import CapturedStep
from steelyard.ir.graph import Graph
from tests.zoo import case
from tests.zoo.case import Sample, square_loss

_CPU = torch.device("cpu")


def _source(sample: Sample) -> CapturedStep:
    """Return the step with at least four samples."""
    model, loss, batch = sample

    def repeated(leaf: Any) -> Any:
        return torch.cat([leaf] * -(-4 // len(leaf))) if isinstance(leaf, torch.Tensor) else leaf

    return CapturedStep(model=model, loss=loss, batch=_torch.tree_map(repeated, batch))


def _derived(source: CapturedStep, *, before: int, after: int) -> Graph | None:
    whole = source.captured().graph
    return with_samples(whole, before=before, after=after, device=_CPU)


def _assert_equal(derived: Graph | None, captured: Graph) -> None:
    assert derived is not None
    differing = [
        (node, other)
        for node, other in zip(derived.nodes, captured.nodes, strict=True)
        if node != other
    ]
    assert differing == []
    assert are_equal(derived, captured)


@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        "mlp",
        "lstm",  # its states have the samples in dim 1
        "resnet_bn",
        "edge_group_norm",  # its operators have the number of samples as an argument
        "hf_gpt2",  # numbers the samples for its mask
        pytest.param("hf_t5", marks=pytest.mark.slow),
        pytest.param("hf_bart", marks=pytest.mark.slow),
        pytest.param("hf_whisper", marks=pytest.mark.slow),
        pytest.param("hf_mamba", marks=pytest.mark.slow),
        pytest.param("hf_llama", marks=pytest.mark.slow),
    ],
)
def test_a_derived_graph_equals_a_capture(name: str) -> None:
    source = _source(case(name).make())
    derived = source.graph(micro_batches=2)
    assert (1, 2) not in source._captured
    _assert_equal(derived, source.captured(micro_batches=2).graph)
    assert source.is_as_derived(micro_batches=2)


class _Attention(nn.Module):
    """Attention whose heads, words and samples are equally many."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.heads = size
        self.project = nn.Linear(4 * size, 12 * size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, words, width = x.shape
        q, k, v = (
            part.view(samples, words, self.heads, -1).transpose(1, 2)
            for part in self.project(x).split(width, dim=-1)
        )
        mask = torch.ones(words, words, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, -1e4).softmax(-1)
        return (scores @ v).transpose(1, 2).reshape(samples, words, width)


def test_samples_are_told_from_heads_and_words_of_the_same_number() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 4, 16), "y": torch.randn(4, 4, 16)}
    source = _source((_Attention(4), square_loss, batch))
    _assert_equal(source.graph(micro_batches=2), source.captured(micro_batches=2).graph)


class _SecondDim(nn.Module):
    """Computes with the samples behind the words, as nn.Transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words_first = x.transpose(0, 1)
        flat = self.linear(words_first.reshape(-1, 8))
        return flat.view(words_first.shape).transpose(0, 1)


def test_samples_may_be_inside_a_dim() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(6, 5, 8), "y": torch.randn(6, 5, 8)}
    source = _source((_SecondDim(), square_loss, batch))
    for parts in (2, 3):
        _assert_equal(source.graph(micro_batches=parts), source.captured(micro_batches=parts).graph)


def test_a_share_of_several_parts_is_derived() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
    source = _source((nn.Linear(4, 4), square_loss, batch))
    _assert_equal(
        source.graph(micro_batches=4, share=3), source.captured(micro_batches=4, share=3).graph
    )


def test_a_single_sample_is_captured() -> None:
    source = _source(case("mlp").make())
    samples = len(next(iter(_torch.tree_leaves(source.batch))))
    assert _derived(source, before=samples, after=1) is None
    source.graph(micro_batches=samples)
    assert (1, samples) in source._captured


class _ByNumber(nn.Module):
    """Takes another path for few samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.relu().relu() if len(x) < 4 else y.relu()


def test_a_step_that_depends_on_the_number_of_samples_is_run_as_captured() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    source = _source((_ByNumber(), square_loss, batch))
    derived = source.graph(micro_batches=2)
    assert not source.is_as_derived(micro_batches=2)
    assert source.is_as_derived(micro_batches=2), "a repeated search uses the capture"
    captured = source.graph(micro_batches=2)
    assert not are_equal(derived, captured)
    assert len(captured.nodes) > len(derived.nodes)


class _Cut(nn.Module):
    """Uses some of the samples, so the sizes of its operators cannot follow their number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y + y[:1].sum()


def test_a_graph_that_cannot_be_derived_is_captured() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    source = _source((_Cut(), square_loss, batch))
    assert _derived(source, before=4, after=2) is None
    assert source.graph(micro_batches=2) is source.captured(micro_batches=2).graph


@torch.library.custom_op("steelyard_tests::of_four", mutates_args=())
def _of_four(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@_of_four.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    assert len(x) == 4, "another number of samples"
    return torch.empty_like(x)


_of_four.register_autograd(lambda _, gradient: gradient)


def test_an_operator_may_raise_anything_for_another_number_of_samples() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = _of_four(model(batch["x"]))
        return y.square().mean()

    source = _source((layer, loss, {"x": torch.randn(4, 4)}))
    assert _derived(source, before=4, after=2) is None


def test_graphs_that_differ_in_one_node_are_not_equal() -> None:
    graph = _source(case("mlp").make()).captured().graph
    *nodes, last = graph.nodes
    assert are_equal(graph, replace(graph))
    assert not are_equal(
        graph, replace(graph, nodes=(*nodes, replace(last, phase=last.phase, nth=9)))
    )
