"""Sharded steps on several ranks equal the whole step by value, for any placement.

All ranks are in one process (see in_step.py), in double precision, so that a wrong sum cannot pass
for rounding. Real processes are in tests/system/dist.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from steelyard import _torch
from steelyard.capture.spmd.partition import partition
from steelyard.capture.step import Captured, CapturedStep
from steelyard.comm.devices import CPU
from steelyard.errors import BadInput
from steelyard.ir.collective import GLOO, Exchange
from steelyard.ir.graph import Argument, Graph, Node, OutputKind, Phase, Role, Symbol
from steelyard.ir.placement import PARTIAL, REPLICATE, Placement, Shard, fits
from steelyard.ir.sharding_choice import ShardingChoice
from steelyard.operators import torch_object
from tests import zoo
from tests.support import in_step
from tests.support.torch_since import torch_since

pytestmark = torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12")

# Models that compute in single precision inside, whatever their weights are, are compared with the
# larger tolerance.
ROUNDING, ROUNDING_SINGLE = 1e-12, 1e-6
_MODELS = ("gpt", "gpt_sdpa", "moe", "resnet_bn", "hf_llama", "hf_mixtral")


class Whole:
    """A case of the zoo in double precision, with the results of one device and of its parts."""

    @staticmethod
    def named(name: str) -> Whole:
        return _whole_of(name)

    def __init__(self, model: nn.Module, loss: Any, batch: Any) -> None:
        self.model = copy.deepcopy(model).double()
        self.batch = _torch.tree_map(_widened, batch)
        self.captured: Captured = CapturedStep(
            model=self.model, loss=loss, batch=self.batch
        ).captured()
        self.graph: Graph = self.captured.graph
        constants = self.captured.constants
        self.given = in_step.given(self.graph, self.model, self.batch, constants)
        (self.left,) = in_step.run([self.graph], [self.given])

    def in_parts(self, choice: ShardingChoice) -> list[Graph]:
        ranks = range(choice.num_ranks)
        return [partition(self.graph, choice, rank=rank, transport=GLOO) for rank in ranks]

    def error(self, choice: ShardingChoice, graphs: list[Graph]) -> float:
        """Return the largest difference of the step's outputs, relative to the largest output."""
        placed: dict[str, Placement] = dict(choice.inputs)
        inputs = [
            {
                name: in_step.cut(x, placed.get(name, REPLICATE), rank, choice.num_ranks)
                for name, x in self.given.items()
            }
            for rank in range(choice.num_ranks)
        ]
        left = in_step.run(graphs, inputs)
        largest = max(float(x.abs().max()) for k, x in self.left.values.items() if k[1])
        worst = 0.0
        for key, expected in self.left.values.items():
            parts = [rank.values[key] for rank in left]
            got = in_step.joined(parts, placed.get(key[1], REPLICATE))
            # A gradient that is zero up to rounding (of a bias before BatchNorm) has no scale of
            # its own.
            scale = max(float(expected.abs().max()), largest / 100)
            worst = max(worst, float((got - expected).abs().max()) / scale)
        return worst

    def at_random(self, seed: int, num_ranks: int) -> ShardingChoice:
        """Return random placements of most parameters and buffers, and of some intermediate
        values."""
        chance = random.Random(seed)
        inputs, values = [], []
        for node in self.graph.nodes:
            if len(node.outputs) != 1 or node.is_getitem:
                continue
            tensor = node.outputs[0]
            shards: list[Placement] = [
                shard
                for dim in range(len(tensor.shape))
                for shard in (Shard(dim), Shard(dim), Shard(dim, 2), Shard(dim, 3))
                if fits(tensor, shard, num_ranks)
            ]
            role = self.graph.storages[tensor.storage].role
            if node.is_input and role in (Role.PARAMETER, Role.BUFFER):
                if shards and chance.random() < 0.7:
                    inputs.append((node.name, chance.choice(shards)))
            elif not node.is_input and chance.random() < 0.1:
                if tensor.dtype == "float64":
                    shards.append(PARTIAL)
                if shards:
                    values.append((node.name, chance.choice(shards)))
        return ShardingChoice(
            axis="tensor", num_ranks=num_ranks, inputs=tuple(inputs), values=tuple(values)
        )


@functools.cache
def _whole_of(name: str) -> Whole:
    """Return one cached capture for all tests of a model."""
    return Whole(*zoo.case(name).make())


@pytest.mark.slow
@pytest.mark.parametrize("name", _MODELS)
def test_any_sharding_gives_the_same_step(name: str) -> None:
    whole = Whole.named(name)
    dtypes = {t.dtype for n in whole.graph.nodes if not n.is_input for t in n.outputs}
    bound = ROUNDING_SINGLE if "float32" in dtypes else ROUNDING
    for seed, num_ranks in enumerate((2, 4)):
        choice = whole.at_random(seed, num_ranks)
        assert choice.inputs, "nothing is in parts"
        graphs = whole.in_parts(choice)
        assert whole.error(choice, graphs) < bound
        for graph in graphs:
            assert graph.problems() == []
            named = Counter((n.path, n.op, n.nth) for n in graph.forward())
            assert max(named.values()) == 1, "two calls of one name"


def test_columns_then_rows_cost_one_exchange_forward_and_one_backward() -> None:
    whole = Whole.named("gpt")
    choice = ShardingChoice(axis="tensor", num_ranks=2, inputs=tuple(_columns_then_rows(layers=2)))
    graphs = whole.in_parts(choice)
    assert whole.error(choice, graphs) < ROUNDING
    nodes = [graphs[0].by_name[name] for name in graphs[0].collectives]
    kinds = Counter((n.phase, n.collective.kind) for n in nodes if n.collective)
    # Each of two blocks has one for attention and one for the MLP; Shoeybi et al. 2019, figure 4.
    assert kinds == {
        (Phase.FORWARD, Exchange.ALL_REDUCE): 4,
        (Phase.BACKWARD, Exchange.ALL_REDUCE): 4,
    }
    # All products are halved, except those with the head, which stays whole.
    head = sum(n.flops for n in whole.graph.nodes if n.path == "head")
    assert graphs[0].flops == (whole.graph.flops - head) // 2 + head


def test_a_residual_stream_in_parts_spreads_by_itself() -> None:
    """It is chosen for two values only, and sequence parallelism follows (Korthikanti et al.
    2022)."""
    whole = Whole.named("gpt")
    weights = tuple(_columns_then_rows(layers=2))
    plain = ShardingChoice(axis="tensor", num_ranks=2, inputs=weights)
    cut = ShardingChoice(
        axis="tensor", num_ranks=2, inputs=weights, values=(("add", Shard(1)), ("add_1", Shard(1)))
    )
    graphs = whole.in_parts(cut)
    assert whole.error(cut, graphs) < ROUNDING
    forward = [n for n in graphs[0].forward() if n.collective is not None]
    assert {n.collective.kind for n in forward if n.collective} == {
        Exchange.ALL_GATHER,
        Exchange.REDUCE_SCATTER,
    }
    norms = [n for n in graphs[0].nodes if n.op == "aten.native_layer_norm.default"]
    rows = [n.outputs[0].shape[1] for n in whole.in_parts(plain)[0].nodes if n.op == norms[0].op]
    assert [2 * n.outputs[0].shape[1] for n in norms] == rows


def test_a_split_vocabulary_never_gathers_its_scores() -> None:
    whole = Whole.named("gpt")
    choice = ShardingChoice(
        axis="tensor", num_ranks=2, inputs=(("parameter:token.weight", Shard(0)),)
    )
    graphs = whole.in_parts(choice)
    assert whole.error(choice, graphs) < ROUNDING
    gathered = [
        n
        for n in graphs[0].nodes
        if n.collective is not None and n.collective.kind is Exchange.ALL_GATHER
    ]
    # Each rank sends one number for each of 64 rows: the logarithm of its sum of exponentials.
    assert [n.outputs[0].shape for n in gathered] == [(2, 64)]


class Masked(nn.Module):
    """A model whose scores are overwritten in place, through a view of the product."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(2, 6, 4, 4).transpose(1, 2).reshape(8, 6, 4)
            for layer in (self.query, self.key, self.value)
        )
        scores = torch.bmm(q, k.transpose(1, 2)).view(2, 4, 6, 6)
        scores.masked_fill_(torch.ones(6, 6, dtype=torch.bool).triu(1), -1e4)
        mixed = torch.bmm(scores.softmax(-1).view(8, 6, 6), v)
        out: Tensor = self.out(mixed.view(2, 4, 6, 4).transpose(1, 2).reshape(2, 6, 16))
        return out


def test_values_overwritten_in_place_stay_sharded() -> None:
    """The gradient is copied over an empty tensor of the same shape."""
    batch = torch.randn(2, 6, 16)
    whole = Whole(Masked(), lambda model, x: model(x).square().sum(), batch)
    columns = [(f"parameter:{n}.weight", Shard(0)) for n in ("query", "key", "value")]
    biases = [(f"parameter:{n}.bias", Shard(0)) for n in ("query", "key", "value")]
    choice = ShardingChoice(
        axis="tensor",
        num_ranks=2,
        inputs=(*columns, *biases, ("parameter:out.weight", Shard(1))),
        values=(),
    )
    graphs = whole.in_parts(choice)
    assert whole.error(choice, graphs) < ROUNDING
    assert any(n.op == "aten.copy.default" for n in whole.graph.nodes), "nothing is copied over"
    for graph in graphs:
        exchanged = [n for n in graph.nodes if n.collective is not None]
        # The only exchange is the sum of the last product: nothing reads a gradient of the batch.
        assert [n.collective.kind for n in exchanged if n.collective] == [Exchange.ALL_REDUCE]
        assert not any(n.op == "aten.new_empty_strided.default" for n in graph.nodes)


def test_differently_sharded_blocks_are_no_run_of_equal_blocks() -> None:
    whole = Whole.named("gpt")
    assert whole.graph.runs
    for layers, left in ((1, ()), (2, whole.graph.runs)):
        choice = ShardingChoice(
            axis="tensor", num_ranks=2, inputs=tuple(_columns_then_rows(layers=layers))
        )
        assert whole.in_parts(choice)[0].runs == left


def test_no_sharding_gives_the_captured_step() -> None:
    whole = Whole.named("gpt")
    (graph, _) = whole.in_parts(ShardingChoice(axis="tensor", num_ranks=2))
    assert [(n.name, n.op, n.signature, n.nth) for n in graph.nodes] == [
        (n.name, n.op, n.signature, n.nth) for n in whole.graph.nodes
    ]
    assert graph.flops == whole.graph.flops
    assert [n.moved_bytes for n in graph.nodes] == [n.moved_bytes for n in whole.graph.nodes]


def test_a_size_that_does_not_divide_is_refused_in_three_lines() -> None:
    whole = Whole.named("mlp")
    for choice in (
        ShardingChoice(axis="tensor", num_ranks=3, inputs=(("parameter:0.weight", Shard(0)),)),
        ShardingChoice(axis="tensor", num_ranks=2, inputs=(("parameter:0.wieght", Shard(0)),)),
    ):
        with pytest.raises(BadInput):
            whole.in_parts(choice)


def test_gradients_are_sharded_like_their_parameters() -> None:
    whole = Whole.named("resnet_bn")
    choice = whole.at_random(7, 2)
    for graph in whole.in_parts(choice):
        storages = []
        for output in graph.outputs:
            if output.kind is OutputKind.GRADIENT:
                made, of = graph.by_name[output.node], graph.by_name[output.target]
                assert made.outputs[0].shape == of.outputs[0].shape
                assert made.outputs[0].stride == of.outputs[0].stride
                storages.append(made.outputs[0].storage)
        assert len(set(storages)) == len(storages)


def _columns_then_rows(*, layers: int) -> list[tuple[str, Placement]]:
    found: list[tuple[str, Placement]] = []
    for layer in range(layers):
        at = f"parameter:blocks.{layer}"
        found += [(f"{at}.attention.qkv.{kind}", Shard(0, 3)) for kind in ("weight", "bias")]
        found += [(f"{at}.mlp.up.{kind}", Shard(0)) for kind in ("weight", "bias")]
        found += [(f"{at}.{name}.weight", Shard(1)) for name in ("attention.out", "mlp.down")]
    return found


def _widened(leaf: Any) -> Any:
    is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(torch.float64) if is_float else leaf


@pytest.mark.parametrize(
    "name", ["gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hf_llama", "moe"))]
)
def test_a_gpu_step_is_sharded_like_a_cpu_step(name: str) -> None:
    """Tensors that the step creates, such as positions and masks, are created on the GPU.

    This test needs no GPU, because nothing is computed.
    """
    whole = Whole.named(name)
    there = replace(whole.graph, nodes=tuple(map(_on_a_gpu, whole.graph.nodes)))
    assert there != whole.graph, "nothing was made of nothing"
    choice, gpu = whole.at_random(1, 2), torch.device("cuda", 0)
    # A copy with other strides needs the driver, even where nothing is copied, so it is replaced.
    laid_out = {"steelyard.copy_strided": lambda x, *laid: x.new_empty_strided(*laid)}
    with mock.patch.dict("steelyard.operators._OWN", laid_out):
        graph = partition(there, choice, rank=1, transport=GLOO, device=gpu)
    here = whole.in_parts(choice)[1]
    assert [(n.name, n.outputs) for n in graph.nodes] == [(n.name, n.outputs) for n in here.nodes]
    assert graph.problems() == []


def _on_a_gpu(node: Node) -> Node:
    args = tuple(map(_argument_on_a_gpu, node.args))
    kwargs = tuple((key, _argument_on_a_gpu(value)) for key, value in node.kwargs)
    return replace(node, args=args, kwargs=kwargs)


def _argument_on_a_gpu(argument: Argument) -> Argument:
    is_processor = isinstance(argument, Symbol) and torch_object(argument.text) == CPU
    return Symbol("torch.device('cuda:0')") if is_processor else argument
