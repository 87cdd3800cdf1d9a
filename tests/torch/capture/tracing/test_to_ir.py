"""A captured graph: the module of each node, its storage, and its costs."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from steelyard import _torch
from steelyard.capture.tracing import source_lines
from steelyard.capture.tracing.source_lines import is_user_file, short_file
from steelyard.ir.graph import Graph, OutputKind, Phase, Role
from tests.support.stepping import source_of
from tests.zoo import Sample, case
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

# All tests use the same few graphs.
pytestmark = pytest.mark.xdist_group("plain graphs")

NAMED = ("gpt", "moe", "resnet_bn", "hf_t5", "hf_llama", "edge_tied_module")


def graph_of(sample: Sample) -> Graph:
    return source_of(sample).graph(micro_batches=1)


@cache
def named(name: str) -> Graph:
    """Return one cached trace for all tests of this model."""
    return graph_of(case(name).make())


@cache
def small_graph(**config: Any) -> Graph:
    """Return one cached graph."""
    return graph_of(small_gpt(**config))


def small_gpt(*, width: int = 32, dropout: float = 0.1, batch: int = 4, layers: int = 2) -> Sample:
    model = GPT(layers=layers, width=width, heads=2, vocabulary=64, length=16, dropout=dropout)
    return model, next_token_loss, tokens(batch, 16, 64)


# --- the module of a node -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_only_loss_nodes_have_no_module(name: str) -> None:
    """Nodes without a path belong to the loss function: they come after every module, or lead
    from the loss back to the first module of the backward pass."""
    model, _, _ = case(name).make()
    graph = named(name)
    modules = {path for path, _ in model.named_modules(remove_duplicate=False)}
    owned = [n for n in graph.nodes if not n.is_input and n.path]
    assert {n.path for n in owned} <= modules
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert any(n.path for n in graph.nodes if n.phase is phase)
    outside = {n.line for n in graph.nodes if not n.is_input and not n.path}
    for line in outside:
        assert re.search(r"(case|own|edge|hf|loss_utils|modeling_\w+)\.py:\d+$", line), line
    share = len(owned) / sum(not n.is_input for n in graph.nodes)
    assert share > 0.75, "most of a step belongs to some module"


@pytest.mark.parametrize("name", NAMED)
def test_every_node_has_the_users_source_line(name: str) -> None:
    graph = named(name)
    without = [n.name for n in graph.nodes if not n.is_input and not re.search(r":\d+$", n.line)]
    assert without == []
    assert not any(n.line.startswith("/") for n in graph.nodes), "a path of this machine"


def test_forward_and_backward_lines_are_the_same_lines() -> None:
    graph = small_graph()
    by_phase = {
        phase: {n.line for n in graph.nodes if n.phase is phase and not n.is_input}
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    assert by_phase[Phase.BACKWARD] <= by_phase[Phase.FORWARD]


def test_forward_nodes_come_before_backward_nodes_and_never_read_them() -> None:
    for name in NAMED:
        graph = named(name)
        assert graph.problems() == []
        phases = {n.name: n.phase for n in graph.nodes}
        for node in graph.forward():
            assert all(phases[i] is Phase.FORWARD for i in node.inputs)


def test_gradients_of_a_residual_belong_to_the_block_that_they_enter() -> None:
    graph = small_graph()
    sums = [
        n for n in graph.nodes if n.phase is Phase.BACKWARD and n.op.startswith("aten.add.Tensor")
    ]
    assert sums
    assert all(n.path.startswith(("blocks.", "head", "token")) for n in sums), [
        n.path for n in sums
    ]


class WrittenOver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.into(x).view(2, 2, 2)
        made.masked_fill_(torch.eye(2, dtype=torch.bool), 0.0)
        return made.reshape(2, 4)


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).square().sum()
    return out


def test_gradients_of_overwritten_values_belong_to_their_block() -> None:
    graph = graph_of((nn.Sequential(WrittenOver(), WrittenOver()), squared, torch.randn(2, 4)))
    backward = [n for n in graph.nodes if n.phase is Phase.BACKWARD]
    copies = [n for n in backward if n.op == "aten.copy.default"]
    assert {n.path for n in copies} == {"0", "1"}
    filled = [n for n in backward if n.op == "aten.masked_fill.Scalar"]
    assert [n.path for n in filled] == ["1", "0"]


def test_a_forward_node_is_named_by_module_operator_and_count() -> None:
    for name in NAMED:
        graph = named(name)
        keys = [(n.path, n.op, n.nth) for n in graph.forward()]
        assert len(keys) == len(set(keys))


# --- storages -------------------------------------------------------------------------------------


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        early, late = y.view(4, 2, 4).unbind(1)
        return early.transpose(0, 1).exp() + late.t()


def test_views_share_the_storage_of_their_base() -> None:
    batch = {"x": torch.randn(4, 8)}
    graph = graph_of((Views(), lambda m, b: m(b["x"]).sum(), batch))
    views = [n for n in graph.forward() if n.is_view]
    assert {n.op for n in views} >= {"aten.view.default", "aten.unbind.int", "getitem"}
    for node in views:
        capture_and_price = {s for i in node.inputs for s in graph.storages_of(i)}
        assert set(graph.storages_of(node.name)) <= capture_and_price
        assert node.moved_bytes == 0
        assert node.is_free
    early, late = (
        next(n for n in graph.nodes if n.is_getitem and n.args[1] == k).outputs[0] for k in (0, 1)
    )
    assert (early.storage, early.offset, late.offset) == (late.storage, 0, 4)
    fresh = next(n for n in graph.forward() if n.op == "aten.exp.default")
    assert not fresh.is_view
    assert graph.storages_of(fresh.name)[0] not in graph.storages_of(fresh.inputs[0])


def test_roles_and_bytes_of_inputs_are_those_of_the_live_tensors() -> None:
    model, loss, batch = case("resnet_bn").make()
    graph = graph_of((model, loss, batch))
    expected = {
        Role.PARAMETER: sum(p.untyped_storage().nbytes() for p in model.parameters()),
        Role.BUFFER: sum(b.untyped_storage().nbytes() for b in model.buffers()),
        Role.BATCH: sum(t.untyped_storage().nbytes() for t in batch.values()),
    }
    for role, nbytes in expected.items():
        assert graph.resident_bytes(role) == nbytes


def test_random_nodes_are_marked_and_only_they() -> None:
    def count(graph: Graph) -> int:
        return sum(n.is_random for n in graph.nodes)

    random = graph_of(small_gpt(dropout=0.1))
    # One for the embeddings; for each of two blocks one for attention, its output, and the
    # feedforward part.
    assert count(random) == 1 + 2 * 3
    assert all(n.op.split(".")[1] == "bernoulli" for n in random.nodes if n.is_random)
    assert count(graph_of(small_gpt(dropout=0.0))) == 0


def test_only_the_mask_of_a_dropout_is_random_and_it_is_boolean() -> None:
    graph = small_graph()
    for node in graph.nodes:
        if node.is_random:
            assert node.outputs[0].dtype == "bool"


def test_a_tied_weight_is_one_input_with_one_gradient() -> None:
    model, loss, batch = small_gpt()
    graph = graph_of((model, loss, batch))
    names = [n.name for n in graph.inputs() if "token" in n.name or "head" in n.name]
    assert names == ["parameter:token.weight"]
    targets = [o.target for o in graph.outputs if o.kind is OutputKind.GRADIENT]
    assert sorted(targets) == sorted(f"parameter:{n}" for n, _ in model.named_parameters())


def test_frozen_parameters_have_no_gradient_and_pay_no_backward() -> None:
    model, loss, batch = small_gpt()
    whole = graph_of((model, loss, batch))
    model.blocks[0].requires_grad_(False)
    model.token.requires_grad_(False)
    model.position.requires_grad_(False)
    frozen = graph_of((model, loss, batch))
    targets = {o.target for o in frozen.outputs if o.kind is OutputKind.GRADIENT}
    assert targets == {f"parameter:{n}" for n, p in model.named_parameters() if p.requires_grad}
    assert not any(n.path.startswith("blocks.0") for n in frozen.nodes if n.phase is Phase.BACKWARD)
    assert frozen.flops < whole.flops


def test_a_parameter_that_the_loss_does_not_reach_is_listed_as_unused() -> None:
    model, loss, batch = case("edge_unused_parameter").make()
    graph = graph_of((model, loss, batch))
    loss(model, batch).backward()
    assert set(graph.unused) == {n for n, p in model.named_parameters() if p.grad is None}
    assert graph.unused


def test_batchnorm_statistics_leave_as_updates_of_their_buffers() -> None:
    model, loss, batch = case("convnet_bn").make()
    graph = graph_of((model, loss, batch))
    updated = {o.target for o in graph.outputs if o.kind is OutputKind.UPDATE}
    assert updated == {f"buffer:{n}" for n, _ in model.named_buffers()}


# --- FLOPs and bytes ------------------------------------------------------------------------------


def counted_flops(sample: Sample) -> tuple[int, int]:
    """Return the FLOPs of the forward pass and of the whole step, by torch's own counter."""
    model, loss, batch = sample
    with FlopCounterMode(display=False) as forward:
        value = loss(model, batch)
    with FlopCounterMode(display=False) as backward:
        value.backward()
    ahead = forward.get_total_flops()
    return ahead, ahead + backward.get_total_flops()


@pytest.mark.parametrize(
    ("name", "published_gflop"),
    [("alexnet", 1.4), pytest.param("resnet152", 22.6, marks=pytest.mark.slow)],
    ids=str,
)
def test_flops_equal_the_published_counts(name: str, published_gflop: float) -> None:
    with _torch.FakeTensorMode(allow_non_fake_inputs=True):
        model, loss, batch = case(name).make(0, "small")
    sample = _on_meta(model), loss, _torch.tree_map(_meta, batch)
    # A step is planned without running it: a few of many blocks are traced, and all are counted.
    graph = source_of(sample, for_planning=True).graph(micro_batches=1)
    forward = sum(n.flops for n in graph.forward())
    assert forward / 1e9 == pytest.approx(published_gflop, abs=0.05)
    counted, whole = counted_flops(sample)
    assert forward == counted
    assert graph.flops == whole


def _meta(leaf: Any) -> Any:
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _on_meta(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    twin = _meta(tensor)
                    held[name] = nn.Parameter(twin) if isinstance(tensor, nn.Parameter) else twin
    return model


@pytest.mark.parametrize("name", ["gpt", "mlp", "convnet_bn", "hf_bert", "hf_t5"])
def test_flops_of_small_models_equal_the_count_of_torch(name: str) -> None:
    graph = named(name)
    forward, whole = counted_flops(case(name).make())
    assert sum(n.flops for n in graph.forward()) == forward
    assert graph.flops == whole


def test_fused_attention_is_counted_as_if_spelled_out() -> None:
    def flops(fused: bool) -> list[int]:
        model = GPT(layers=1, width=32, heads=2, vocabulary=64, length=16, dropout=0.0, fused=fused)
        graph = graph_of((model, next_token_loss, tokens(2, 16, 64)))
        return [
            sum(n.flops for n in graph.nodes if n.phase is phase)
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        ]

    spelled, fused = flops(fused=False), flops(fused=True)
    assert fused[0] == spelled[0]
    # The fused kernel keeps no scores and computes them a second time, which is one more product.
    scores = 2 * 2 * 2 * 16 * 16 * 16
    assert fused[1] == spelled[1] + scores


def test_an_operator_given_one_tensor_twice_is_measured_apart() -> None:
    def signatures(loss: Any) -> set[str]:
        batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
        graph = graph_of((nn.Linear(8, 8), loss, batch))
        return {n.signature for n in graph.forward() if n.op == "aten.mul.Tensor"}

    twice = signatures(lambda m, b: (m(b["x"]) * b["y"]).pow(2).mul(1.0).sum())
    same = signatures(lambda m, b: torch.mul(*[m(b["x"])] * 2).sum())
    different = signatures(lambda m, b: torch.mul(m(b["x"]), b["y"]).sum())
    assert len(same) == len(different) == 1
    assert same != different
    assert different <= twice


# --- fingerprints ---------------------------------------------------------------------------------


def test_a_fingerprint_survives_retracing() -> None:
    for name in ("gpt", "hf_t5", "resnet_bn"):
        first, second = named(name), graph_of(case(name).make(1))
        assert first.fingerprint == second.fingerprint
        assert first.model_fingerprint == second.model_fingerprint


def test_a_fingerprint_tells_other_models_apart() -> None:
    prints = {
        "as it is": small_graph().fingerprint,
        "more dropout": small_graph(dropout=0.2).fingerprint,
        "wider": small_graph(width=64).fingerprint,
        "deeper": small_graph(layers=3).fingerprint,
        "larger batch": small_graph(batch=8).fingerprint,
    }
    model, loss, batch = small_gpt()
    model.eval()
    prints["eval"] = graph_of((model, loss, batch)).fingerprint
    model.train()
    model.blocks[1].requires_grad_(False)
    prints["frozen"] = graph_of((model, loss, batch)).fingerprint
    assert len(set(prints.values())) == len(prints), prints


def test_the_models_fingerprint_is_the_same_at_every_batch_size() -> None:
    prints = {small_graph(batch=size).model_fingerprint for size in (1, 2, 7)}
    prints.add(small_graph().model_fingerprint)
    assert len(prints) == 1
    assert small_graph(width=64).model_fingerprint not in prints


def test_a_gradient_never_shares_memory_with_another() -> None:
    """``a + b`` gives both the same gradient; clipping one in place must not change the other."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.mse_loss(self.a + self.b, x)

    graph = graph_of((Sum(), lambda m, b: m(b["x"]), {"x": torch.randn(4)}))
    lies_on = [graph.storages_of(o.node)[0] for o in graph.outputs if o.kind is OutputKind.GRADIENT]
    assert len(set(lies_on)) == 2


def test_a_scalar_that_is_added_to_the_loss_gets_its_gradient_in_the_backward_pass() -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("added", nn.Parameter(torch.ones(())))

    def loss(model: Any, batch: Any) -> Any:
        return model(batch["x"]).square().mean() + model.added

    graph = graph_of((model, loss, {"x": torch.randn(4, 2)}))
    phases = [n.phase for n in graph.nodes if not n.is_input]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.BACKWARD].index)


def test_workspace_of_embedding_bag_is_that_of_its_kernel() -> None:
    table, indices = torch.randn(8, 16, requires_grad=True), torch.arange(8).view(2, 4)
    graph = graph_of((Bag(table), lambda m, b: m(b).square().mean(), indices))
    made = torch.ops.aten._embedding_bag.default(
        table.detach(), indices.view(-1), torch.tensor([0, 4]), False, 1
    )
    (node,) = (n for n in graph.nodes if n.op.startswith("aten._embedding_bag.default"))
    storages = [graph.storages[t.storage].nbytes for t in node.outputs]
    assert storages == [t.untyped_storage().nbytes() for t in made]


class Bag(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table.detach())

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding_bag(indices, self.table)


def test_source_lines_of_packages_omit_the_environment_path() -> None:
    assert short_file(".venv/lib/python3.11/site-packages/sums/models/one.py") == "models/one.py"
    assert short_file("models/one.py") == "models/one.py"


def test_user_code_in_a_folder_called_torch_counts_as_the_users() -> None:
    assert is_user_file("/data/torch/steelyard/train.py")
    assert not is_user_file(torch.nn.functional.__file__)
    assert not is_user_file(source_lines.__file__)
