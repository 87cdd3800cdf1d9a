"""A canary for each private torch name: fails the day the name moves or comes to mean another.

Not for what Steelyard does with them: that is tested where it is done.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import logging
import random
import re
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steelyard import _torch
from steelyard._torch import inductor, operators, private_names
from steelyard._torch.private_names import PRIVATE_NAMES
from steelyard.errors import BadInput
from steelyard.operators import operator_named
from steelyard.operators.missing_flops import may_multiply_uncounted
from steelyard.passes.pipeline.in_place_sends import WRITING
from steelyard.torch_version import minor_version
from tests.support.torch_since import torch_since

aten = torch.ops.aten
VERSION = minor_version(torch.__version__)
_SOURCE = Path(__file__).resolve().parents[2] / "src" / "steelyard"


class Step(nn.Module):
    """A linear layer, BatchNorm for its buffers, a frozen scale, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, batch: Any) -> Tensor:
        result: Tensor = (self.inner(batch["x"]) * self.scale).square().mean()
        return result


@pytest.fixture(scope="module")
def dynamo_graph() -> Any:
    with _torch.capture_settings(set()):
        captured = _torch.captured_and_guarded(Step(), {"x": torch.randn(2, 4)})
        assert isinstance(captured, _torch.Guarded)
        return captured.graph


@pytest.fixture(scope="module")
def joint(dynamo_graph: Any) -> torch.fx.GraphModule:
    with _torch.capture_settings(set()), contextlib.ExitStack() as stack:
        exported = _torch.aot_export_joint_with_descriptors(
            stack, dynamo_graph, ({"x": torch.randn(2, 4)},), decompositions={}
        )
    graph: torch.fx.GraphModule = exported.graph_module
    return graph


@torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12")
def test_dtensor_says_which_placements_a_product_takes() -> None:
    """The placements are for one axis and need no mesh: result, left operand, right operand."""
    left = _torch.MetaTensor((4, 8), (8, 1), torch.float32)
    right = _torch.MetaTensor((8, 6), (6, 1), torch.float32)
    found = _torch.dtensor_strategies(aten.mm.default, [left, right], {})
    assert [("sum", 0), ("shard", 1), ("shard", 0)] in found
    assert [("shard", 0), ("shard", 0), ("whole", 0)] in found
    assert [("shard", 1), ("whole", 0), ("shard", 1)] in found
    # A rule whose sizes would have to be rewritten is not returned.
    assert _torch.dtensor_strategies(aten.view.default, [left, [32]], {}) == []


def test_every_name_has_a_canary_here_and_a_user_in_the_package() -> None:
    here = Path(__file__).read_text()
    used = "\n".join(p.read_text() for p in _SOURCE.rglob("*.py") if p.parent.name != "_torch")
    for name in _torch.__all__:
        assert re.search(rf"_torch\.{name}\b", here), f"{name} has no canary"
        assert re.search(rf"_torch\.{name}\b", used), f"{name} is used nowhere: take it out"


def test_everything_that_is_imported_or_defined_is_listed() -> None:
    found: set[str] = set()
    for path in {*(_SOURCE / "_torch").glob("*.py")} - {Path(private_names.__file__)}:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                found.update(alias.asname or alias.name for alias in node.names)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_":
                found.add(node.name)
    assert found == set(_torch.__all__)


@pytest.mark.parametrize("file", PRIVATE_NAMES)
def test_this_torch_has_every_name_of_the_table(file: str) -> None:
    oldest = PRIVATE_NAMES[file].oldest
    if oldest <= VERSION:
        private_names.require(file)
        return
    with pytest.raises(BadInput) as caught:
        private_names.require(file)
    first, expected, remedy = str(caught.value).splitlines()
    assert first.endswith(f"does not work under torch {torch.__version__}")
    assert expected == f"  expected: torch {oldest[0]}.{oldest[1]} or newer"
    assert remedy.startswith("  next: pip install")


def test_the_table_has_every_name_that_is_imported_or_read() -> None:
    """A part of a dotted name that begins with an underscore is private, whatever it is read
    from; so is everything in a private module."""
    for path in sorted((_SOURCE / "_torch").glob("*.py")):
        tree, used = ast.parse(path.read_text()), set[str]()
        if path.stem in ("__init__", "private_names"):
            continue
        own = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and re.search(r"^torch\b.*\._", node.module or ""):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute) and re.match("_[a-zA-Z]", node.attr):
                used.add(node.attr)
            elif isinstance(node, ast.Constant) and re.fullmatch(r"_[a-z][a-z_]+", str(node.value)):
                used.add(node.value)
        table = PRIVATE_NAMES[path.stem]
        listed = {
            part
            for name in (*table.imported, *table.names, *table.since)
            for part in name.split(".")
        }
        assert used - listed - own == set(), f"{path.name}: not in private_names.py"


def test_a_torch_that_lacks_a_name_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever name is missing, the error comes before anything runs, in three lines, and is no
    AttributeError."""
    missing = "torch._dynamo.convert_frame.fullgraph_captured"
    lacking = private_names.PrivateNames(feature="capture", names=(missing,))
    monkeypatch.setitem(vars(private_names)["PRIVATE_NAMES"], "dynamo", lacking)
    private_names.require.cache_clear()
    with pytest.raises(BadInput) as caught:
        _torch.captured_and_guarded(Step(), {"x": torch.randn(2, 4)})
    first, expected, remedy = str(caught.value).splitlines()
    assert first == f"capture does not work under torch {torch.__version__}, which has no {missing}"
    assert expected.startswith("  expected: torch 2.11 to ")
    assert remedy.startswith("  next: pip install")
    lacking = private_names.PrivateNames(feature="capture", imported=("torch.gone",))
    monkeypatch.setitem(vars(private_names)["PRIVATE_NAMES"], "fake", lacking)
    with pytest.raises(BadInput, match=r"no torch\.gone"):
        private_names.require_imported()


def test_names_are_needed_from_the_version_on_that_brought_them() -> None:
    table = private_names.PrivateNames(feature="f", names=("a",), since={"b": (2, 13)})
    assert table.needed((2, 12)) == ("a",)
    assert table.needed((2, 13)) == table.needed((3, 0)) == ("a", "b")


# --- tracing --------------------------------------------------------------------------------------


def test_captured_and_guarded_knows_modules_and_source_lines(dynamo_graph: Any) -> None:
    stacks = [
        (str(list(node.meta["nn_module_stack"].values())[-1][0]), node.meta["stack_trace"])
        for node in dynamo_graph.graph.nodes
        if node.op == "call_function" and "nn_module_stack" in node.meta
    ]
    assert any("inner" in path and "test_private_names.py" in trace for path, trace in stacks)
    names = dict(dynamo_graph.named_parameters(remove_duplicate=False))
    assert sum(p.requires_grad for p in names.values()) == 4


def test_captured_and_guarded_says_what_is_no_longer_as_it_was_read() -> None:
    step, batch = Step(), {"x": torch.randn(2, 4)}
    with _torch.capture_settings(set()):
        found = _torch.captured_and_guarded(step, batch)
    broken = found.broken
    assert broken() == ""
    (name,) = [name for name, tensor in found.tensors.items() if tensor is step.scale]
    assert found.find(name)() is step.scale
    assert found.of_batch == {"batch", "batch['x']"}
    assert not found.draws_in_python
    batch["x"] = torch.randn(5, 4)  # the remaining guards do not depend on this
    with torch.no_grad():
        assert broken() == ""
    step.inner[1].momentum = 0.2
    assert re.search(r"momentum == 0\.1 .*  # ", broken())
    step.inner[1].momentum = 0.1
    assert broken() == ""


def test_captured_and_guarded_says_what_was_drawn_by_pythons_generator() -> None:
    class Drawn(Step):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().forward(batch) * random.uniform(1, 2)

    with _torch.capture_settings(set()):
        found = _torch.captured_and_guarded(Drawn(), {"x": torch.randn(2, 4)})
    assert found.draws_in_python


class Replacing(nn.Module):
    """A model that replaces its buffer by another tensor, as ``functional_call`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: Any) -> Any:
        self.calls = self.calls + 1
        return batch.sum() * self.scale


@pytest.mark.parametrize(("model", "is_changed"), [(nn.Linear(2, 2), False), (Replacing(), True)])
def test_functional_calls_write_only_what_changed(model: nn.Module, is_changed: bool) -> None:
    held = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    before = dict(held)

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.held = model, held

        def forward(self, batch: Any) -> Any:
            return torch.func.functional_call(self.model, self.held, (batch,)).sum()

    with _torch.functional_calls():
        Called()(torch.ones(2, 2))
        assert all(held[name] is tensor for name, tensor in before.items()) is not is_changed
    assert all(held[name] is tensor for name, tensor in before.items())
    with _torch.capture_settings(set()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        broken = _torch.captured_and_guarded(Called(), torch.ones(2, 2)).broken
    assert any("held" in str(w.message) for w in caught) is is_changed
    assert broken() == ""


def test_aot_export_joint_with_descriptors_traces_forward_and_backward(joint: Any) -> None:
    tags = {
        node.meta.get("partitioner_tag") for node in joint.graph.nodes if node.op == "call_function"
    }
    assert tags == {"is_forward", "is_backward"}
    behind = [n for n in joint.graph.nodes if n.meta.get("partitioner_tag") == "is_backward"]
    assert any("inner" in str(n.meta.get("fwd_nn_module_stack")) for n in behind)


def test_leaving_the_random_state_tracker_takes_back_what_tracing_left_there() -> None:
    tracker, left = _torch.PhiloxStateTracker, torch.zeros(())
    with tracker():
        tracker.fwd_state.set_state(left, left)
        tracker.bwd_state.set_state(left, left)
        tracker.mark_beginning_of_backward()
    for state in (tracker.running_state, tracker.fwd_state, tracker.bwd_state):
        assert not any(value is left for value in vars(state).values())


def test_descriptors_of_inputs_name_parameters_buffers_batch_and_tangent(joint: Any) -> None:
    found = [node.meta["desc"] for node in joint.graph.find_nodes(op="placeholder")]

    def targets(kind: Any) -> list[str]:
        return sorted(d.target for d in found if isinstance(d, kind))

    assert len(targets(_torch.ParamAOTInput)) == 5
    assert len(targets(_torch.BufferAOTInput)) == 3
    assert any("weight" in target for target in targets(_torch.ParamAOTInput))
    assert [d.idx for d in found if isinstance(d, _torch.PlainAOTInput)] == [0]
    assert sum(isinstance(d, _torch.TangentAOTInput) for d in found) == 1
    assert len(found) == 5 + 3 + 1 + 1


def test_descriptors_of_outputs_name_the_input_they_belong_to(joint: Any) -> None:
    output = joint.graph.output_node()
    values = [d for v, d in zip(output.args[0], output.meta["desc"], strict=True) if v is not None]
    by_descriptor = {str(n.meta["desc"]) for n in joint.graph.find_nodes(op="placeholder")}
    gradients = [d for d in values if isinstance(d, _torch.GradAOTOutput)]
    updates = [d for d in values if isinstance(d, _torch.InputMutationAOTOutput)]
    assert sum(isinstance(d, _torch.PlainAOTOutput) for d in values) == 1
    assert len(gradients) == 4
    assert len(updates) == 3
    assert {str(d.grad_of) for d in gradients} <= by_descriptor
    assert {str(d.mutated_input) for d in updates} <= by_descriptor


def test_op_overload_names_itself_as_namespace_operator_overload(joint: Any) -> None:
    targets = [n.target for n in joint.graph.nodes if n.op == "call_function"]
    overloads = {str(t) for t in targets if isinstance(t, _torch.OpOverload)}
    assert "aten.addmm.default" in overloads
    assert isinstance(aten.add.Tensor, _torch.OpOverload)
    assert not isinstance(aten.add, _torch.OpOverload)


def test_compiled_code_is_valid_for_all_sizes_and_under_dispatch_modes() -> None:
    class Looking(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def half(x: torch.Tensor) -> tuple[torch.Tensor]:
        x.mul_(2)
        return (x.sum(0) / 4,)

    compiled = _torch.compiled(half, [torch.ones(3, 5)])
    for shape in ((3, 5), (1, 7), (300, 1)):
        x = torch.randn(shape)
        before = x.clone()
        with Looking(), torch.no_grad():
            (found,) = compiled(x)
        assert torch.equal(x, 2 * before)
        assert torch.allclose(found, before.sum(0) / 2, atol=1e-5)


def test_compiled_code_is_found_in_the_inductor_cache() -> None:
    """Every process but the first finds the code; lowering it takes seconds."""
    from torch._dynamo.utils import counters  # noqa: TID251 - Inductor counts there

    found = counters["inductor"]
    for _ in range(2):
        hits, passed_by = found["fxgraph_cache_hit"], found["fxgraph_cache_bypass"]
        # There is no cache key for a function whose annotations are strings, as in this file.
        compiled = _torch.compiled(lambda x: (x.sum(1) / 3,), [torch.ones(3, 5)])
        (value,) = compiled(torch.ones(2, 6))
        assert torch.equal(value, torch.tensor([2.0, 2.0]))
    assert found["fxgraph_cache_hit"] == hits + 1
    assert found["fxgraph_cache_bypass"] == passed_by


# --- settings while tracing -----------------------------------------------------------------------


def test_capture_settings_are_dynamos_own_and_are_put_back() -> None:
    import torch._dynamo.config as config  # noqa: TID251 - that it has moved is what is tested

    names = (
        "ignore_logging_functions",
        "allow_rnn",
        "assume_static_by_default",
        "automatic_dynamic_shapes",
        "specialize_float",
    )
    before = [getattr(config, name) for name in names]
    with _torch.capture_settings({print}):
        assert [getattr(config, n) for n in names] == [{print}, True, True, False, True]
    assert [getattr(config, name) for name in names] == before


def test_capture_settings_leave_mkldnn_off_only_inside() -> None:
    before = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    with _torch.capture_settings(set()):
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before


def test_capture_settings_still_find_the_hidden_decompositions() -> None:
    """If torch moves or drops these decompositions, disabling them must be revised."""
    key = torch._C.DispatchKey  # noqa: TID251 - that it has moved is what is tested
    keys = (key.CompositeImplicitAutograd, key.Autograd)
    operators = (aten.lstm.input, aten.gru.input, aten.upsample_bilinear2d.vec)

    def hidden() -> list[bool]:
        return [any(k in operator.py_kernels for k in keys) for operator in operators]

    assert hidden() == [True, True, True]
    with _torch.capture_settings(set()):
        assert hidden() == [False, False, False]
    assert hidden() == [True, True, True]


def test_quiet_logs_is_about_the_logger_that_torch_writes_shape_failures_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        with _torch.FakeTensorMode(), pytest.raises(RuntimeError):
            torch.empty(2, 3) @ torch.empty(2, 3)

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    with _torch.quiet_logs():
        assert not logger.isEnabledFor(logging.CRITICAL)
        fail()
    assert not caplog.records
    assert logger.level == level
    assert "torch._subclasses.fake_tensor" in logging.root.manager.loggerDict


# --- fake tensors and dispatch --------------------------------------------------------------------


def test_fake_tensor_mode_gives_shapes_strides_and_storages_without_memory() -> None:
    with _torch.FakeTensorMode(allow_non_fake_inputs=True):
        large = torch.empty(1 << 20, 1 << 20)
        view, parameter = large.t(), nn.Parameter(torch.empty_strided((2, 3), (1, 2)))
    assert isinstance(large, _torch.FakeTensor)
    assert view.stride() == (1, 1 << 20)
    assert large.untyped_storage().nbytes() == 4 << 40
    assert isinstance(parameter, _torch.FakeTensor)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.stride() == (1, 2)


def test_torch_dispatch_mode_sees_each_operator_below_autograd() -> None:
    seen: list[str] = []

    class Log(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    weight = torch.ones(2, requires_grad=True)
    with Log():
        (weight * 2).sum().backward()
    assert seen[:2] == ["aten.mul.Tensor", "aten.sum.default"]
    assert "aten.expand.default" in seen


def test_storage_key_is_shared_by_aliases_and_by_nothing_else() -> None:
    x = torch.ones(4)
    assert _torch.storage_key(x) == _torch.storage_key(x[1:].view(3, 1))
    assert _torch.storage_key(x) != _torch.storage_key(torch.ones(4))
    with _torch.FakeTensorMode():
        fake = torch.ones(4)
        assert _torch.storage_key(fake) == _torch.storage_key(fake[1:])
        assert _torch.storage_key(fake) != _torch.storage_key(fake.clone())


def test_below_autograd_records_nothing() -> None:
    weight = torch.ones(2, requires_grad=True)
    with _torch.below_autograd():
        result = aten.mul.Tensor(weight, 2)
    assert result.grad_fn is None
    assert aten.mul.Tensor(weight, 2).grad_fn is not None


def test_builtin_of_calls_the_same_operator() -> None:
    x = torch.randn(3)
    assert _torch.builtin_of(aten.add.Tensor) is not aten.add.Tensor
    assert torch.equal(_torch.builtin_of(aten.add.Tensor)(x, 1, alpha=2), x + 2)
    assert _torch.builtin_of(torch.add) is torch.add


def test_mutates_is_what_the_schema_says() -> None:
    assert _torch.mutates(aten.add_.Tensor)
    assert _torch.mutates(aten._foreach_add_.Scalar)
    assert _torch.mutates(aten.mul.out)
    assert not _torch.mutates(aten.add.Tensor)
    assert not _torch.mutates(aten.view.default)


def test_draws_is_what_the_tag_says_but_for_attention_without_dropout() -> None:
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    x = torch.zeros(1, 1, 2, 2)
    assert _torch.draws(aten.bernoulli.p, (x, 0.5), {})
    assert not _torch.draws(aten.mul.Tensor, (x, x), {})
    assert _torch.draws(flash, (x, x, x, 0.1), {})
    assert _torch.draws(flash, (x, x, x), {"dropout_p": 0.1})
    for args in ((x, x, x), (x, x, x, 0.0)):
        before = torch.get_rng_state()
        assert not _torch.draws(flash, args, {})
        flash(*args)
        assert torch.equal(before, torch.get_rng_state())


def test_draws_takes_an_operator_that_torch_does_not_define_to_draw() -> None:
    with torch.library._scoped_library("steelyard_tests", "FRAGMENT") as library:
        library.define("untagged(Tensor x) -> Tensor")
        operator = torch.ops.steelyard_tests.untagged.default
        assert torch.Tag.nondeterministic_seeded not in operator.tags
        assert _torch.draws(operator, (torch.zeros(1),), {})


def test_draws_finds_the_tag_on_whatever_takes_a_generator() -> None:
    """This covers the namespaces whose operators carry the tag."""
    untagged = set()
    every = torch._C._jit_get_all_schemas()  # noqa: TID251 - the list of what is trusted
    for schema in every:
        namespace, _, name = schema.name.partition("::")
        if namespace in operators._TAGGED and any(a.name == "generator" for a in schema.arguments):
            packet = getattr(getattr(torch.ops, namespace), name)
            operator = getattr(packet, schema.overload_name or "default")
            if not _torch.draws(operator, (), {}):
                untagged.add(operator.overloadpacket.__name__)
    # These initialise in place without gradients, or set the generator's own seed.
    assert untagged <= {"_no_grad_normal_", "_no_grad_uniform_", "initial_seed", "manual_seed"}


def test_argument_is_found_by_its_name_wherever_it_is_given() -> None:
    topk, x = torch.ops.aten.topk.default, torch.ones(3)
    assert _torch.argument(topk, (x, 2, 0), {}, "dim") == 0
    assert _torch.argument(topk, (x, 2), {"dim": 1}, "dims", "dim") == 1
    assert _torch.argument(topk, (x, 2), {}, "dim") == -1
    assert _torch.argument(topk, (x, 2), {}, "dropout_p") is None


def test_is_view_is_what_the_schema_says() -> None:
    for session in (aten.t.default, aten.view.default, aten.expand.default, aten.split.Tensor):
        assert _torch.is_view(session)
    for no_look in (aten.add.Tensor, aten.add_.Tensor, aten.clone.default, aten.mul.out):
        assert not _torch.is_view(no_look)


def test_reads_data_is_what_dynamo_makes_of_data() -> None:
    class Data(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.data + x.detach()

    step = _torch.captured_and_guarded(Data(), torch.ones(2)).graph
    assert sum(_torch.reads_data(node) for node in step.graph.nodes) == 1


def test_checkpoints_and_what_is_checkpointed_are_found_in_either_graph() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def again(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = checkpoint(self.again, x, use_reentrant=False)
            return checkpoint(self.again, x, use_reentrant=True, preserve_rng_state=False).sum()

    x = torch.ones(2, 2)
    step = _torch.captured_and_guarded(Checkpointed(), x).graph
    without_gradient, with_gradient = _torch.checkpoints(step)
    assert without_gradient.kwargs == {"use_reentrant": False}
    assert with_gradient.kwargs == {"use_reentrant": True, "preserve_rng_state": False}
    values = [node.meta["example_value"][0] for node in (without_gradient, with_gradient)]
    assert [value.requires_grad for value in values] == [False, True]
    assert any(isinstance(i.meta.get("example_value"), nn.Parameter) for i in with_gradient.args)
    with contextlib.ExitStack() as stack:
        exported = _torch.aot_export_joint_with_descriptors(stack, step, (x,), decompositions={})
    nodes = exported.graph_module.graph.find_nodes(op="call_function", target=aten.tanh.default)
    # torch 2.11 marks both, so capture refuses more there than it would have to.
    assert [_torch.is_checkpointed(node) for node in nodes] == [VERSION < (2, 12), True]


def test_any_hooks_finds_both_kinds() -> None:
    def parameter() -> nn.Parameter:
        return nn.Parameter(torch.ones(2))

    early, late, bare = parameter(), parameter(), parameter()
    handle = early.register_hook(lambda gradient: gradient)
    late.register_post_accumulate_grad_hook(lambda p: None)
    assert _torch.any_hooks([bare, early])
    assert _torch.any_hooks([bare, late])
    assert not _torch.any_hooks([bare])
    handle.remove()
    assert not _torch.any_hooks([bare, early])


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_any_hooks_finds_those_of_the_accumulator(kind: str) -> None:
    other, parameter = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    held = _torch.accumulators([other, parameter])
    found = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    assert found is held[1], "the same node, however one comes by it"
    handle = getattr(found, kind)(lambda *_: None)
    assert _torch.any_hooks([other, parameter], held)
    assert _torch.any_hooks([parameter])
    assert not _torch.any_hooks([other])
    handle.remove()
    assert not _torch.any_hooks([other, parameter], held)


def test_hooks_of_all_modules_are_the_live_registers() -> None:
    from torch.nn.modules import module as m

    adders = {
        "forward hook": m.register_module_forward_hook,
        "forward pre-hook": m.register_module_forward_pre_hook,
        "backward hook": m.register_module_full_backward_hook,
        "backward pre-hook": m.register_module_full_backward_pre_hook,
    }
    registers = _torch.hooks_of_all_modules()
    assert set(registers) == set(adders)
    for kind, add in adders.items():
        assert not registers[kind]
        handle = add(lambda *_: None)
        assert registers[kind]
        handle.remove()


def test_a_fake_tensor_can_be_made_up_from_a_layout() -> None:
    mode = _torch.FakeTensorMode()
    with mode:
        found = torch.empty(3, 4, dtype=torch.float64).t()
        made = _torch.FakeTensor(mode, _torch.on_meta(found), found.fake_device)
        for fake in (found, made):
            assert (fake.shape, fake.stride(), fake.dtype) == ((4, 3), (1, 4), torch.float64)
            assert fake.fake_device == torch.device("cpu")
        assert (made @ torch.ones(3, 2, dtype=torch.float64)).shape == (4, 2)
    assert _torch.on_meta(found).device.type == "meta"
    assert type(_torch.on_meta(found)) is torch.Tensor


# --- pytrees --------------------------------------------------------------------------------------


def test_pytrees_give_leaves_with_paths_in_one_order() -> None:
    tree = {"b": [1, (2, None)], "a": 3}
    leaves, spec = _torch.tree_flatten(tree)
    paths = [_torch.keystr(path) for path, _ in _torch.tree_flatten_with_path(tree)[0]]
    assert leaves == _torch.tree_leaves(tree) == [1, 2, None, 3]
    assert paths == ["['b'][0]", "['b'][1][0]", "['b'][1][1]", "['a']"]
    assert _torch.tree_unflatten(leaves, spec) == tree
    assert _torch.tree_map(str, tree) == {"b": ["1", ("2", "None")], "a": "3"}


def test_specs_of_pytrees_tell_their_kind_and_children() -> None:
    """The binding of batches compares the specs part by part."""
    spec = _torch.tree_flatten({"b": 1, "a": (2, 3)})[1]
    assert spec.type is dict
    assert spec.context == ["b", "a"]
    assert spec.num_children == 2
    assert [child.type for child in spec.children()][1] is tuple
    assert spec == _torch.tree_flatten({"b": 5, "a": (6, 7)})[1]


# --- Inductor -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_inductor_decompositions_draw_no_random_numbers_their_own_way() -> None:
    table = _torch.inductor_decompositions()
    assert aten.gelu.default in table
    assert aten.native_dropout.default not in table
    assert aten.rand_like.default not in table


def test_inductor_decompositions_of_pooling_find_the_module_they_read() -> None:
    code = (
        "import sys; from steelyard import _torch; _torch.inductor_decompositions();"
        "sys.exit('torch._inductor.lowering' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cpp_compiler_is_none_where_there_is_none() -> None:
    import torch._inductor.config as config  # noqa: TID251 - the setting that the search reads
    from torch._inductor import cpp_builder  # noqa: TID251

    def forget() -> None:
        # The result is cached for the life of the process.
        cpp_builder.get_cpp_compiler.__globals__["cpp_compiler_search"].cache_clear()

    found = _torch.cpp_compiler()
    assert found is None or found
    forget()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert _torch.cpp_compiler() is None
    forget()
    assert _torch.cpp_compiler() == found


def test_cpp_errors_are_exceptions() -> None:
    assert all(issubclass(kind, Exception) for kind in _torch.cpp_errors())


def _small(mode: Any) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    with mode:
        x = torch.empty(8, 4)
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    doubled = graph.call_function(aten.mul.Tensor, (given, 2.0))
    shifted = graph.call_function(aten.add.Tensor, (doubled, given))
    given.meta["val"] = x
    with mode:
        doubled.meta["val"], shifted.meta["val"] = x * 2.0, x * 2.0 + x
    graph.output((shifted,))
    return torch.fx.GraphModule(nn.Module(), graph), [x]


@pytest.mark.slow
def test_inductor_caches_in_shared_folders_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    assert inductor._inductor_cache_folder() == folder
    with pytest.raises(BadInput, match="can be written by other users"):
        _torch.compiled_kernels({})
    with _torch.inductor_settings() as mode:
        graph, fakes = _small(mode)
        with pytest.raises(BadInput, match="can be written by other users"):
            _torch.inductor_compiled(graph, fakes, mode=mode, is_backward=False)
    assert [*folder.iterdir()] == []


@pytest.mark.slow
def test_inductor_lowered_writes_source_and_inductor_compiled_runs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with _torch.inductor_settings() as mode:
            graph, fakes = _small(mode)
            _, source, lowering = _torch.inductor_lowered(
                graph, fakes, mode=mode, is_backward=False
            )
            assert "def call(" in source or "def call(self" in source
            assert lowering.name_to_buffer
            assert dict(lowering.constants) == {}
            if _torch.cpp_compiler() is None:
                pytest.skip("no C++ compiler here")
            graph, fakes = _small(mode)
            run = _torch.inductor_compiled(graph, fakes, mode=mode, is_backward=False)
            (written,) = re.findall(r"cpp_pybinding\((\[.*?\]), r\'\'\'(.*?)\'\'\'\)", source, re.S)
            kernels = _torch.compiled_kernels({"one": (ast.literal_eval(written[0]), written[1])})
    x = torch.randn(8, 4)
    given = [x]
    (result,) = run(given)
    assert given == []
    assert torch.allclose(result, 3 * x)
    assert run.source_code
    assert len(run.output_strides) == 1
    # The same kernel, called alone.
    again = torch.empty(8, 4)
    kernels["one"](x, again)
    assert torch.equal(again, result)


def test_taken_apart_gives_decomposed_operators_that_do_not_mutate() -> None:
    def changed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.gelu(x), x.add(1).mul_(2)

    with _torch.FakeTensorMode(static_shapes=True):
        graph = _torch.taken_apart(changed, [torch.empty(3)], _torch.inductor_decompositions())
    called = [n.target for n in graph.nodes if n.op == "call_function"]
    assert aten.erf.default in called
    assert aten.mul.Tensor in called
    assert not [t for t in called if "gelu" in str(t) or _torch.mutates(t)]


# --- private tables of modules, which the model guards read ---------------------------------------


def test_modules_keep_their_tables_under_the_names_that_are_watched() -> None:
    tables = (
        *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
        *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    )
    module = nn.Linear(2, 2)
    module.register_full_backward_hook(lambda *_: None)
    assert set(tables) <= set(vars(module))
    assert module._backward_hooks
    module.register_full_backward_pre_hook(lambda *_: None)
    assert module._backward_pre_hooks


def test_the_engine_is_below_what_autograd_calls() -> None:
    seen: list[bool] = []

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            seen.append(any(_torch.is_engine(f) for f, _ in traceback.walk_stack(None)))
            return gradients[0]

    Looking.apply(torch.ones((), requires_grad=True)).backward()
    assert seen == [True]


# --- devices --------------------------------------------------------------------------------------


def test_a_gpu_can_be_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*inspect.signature(torch.cuda._sleep).parameters] == ["cycles"]
    told: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", told.append)
    _torch.keep_busy(7)
    assert told == [7]


def test_callbacks_run_when_cuda_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "callable" in inspect.signature(torch.cuda._lazy_call).parameters
    done: list[int] = []
    with monkeypatch.context() as begun:
        begun.setattr(torch.cuda, "is_initialized", lambda: True)
        _torch.when_cuda_begins(lambda: done.append(1))
    assert done == [1]
    if not torch.cuda.is_initialized():
        queued = vars(torch.cuda)["_queued_calls"]
        before = len(queued)
        _torch.when_cuda_begins(lambda: done.append(2))
        assert (len(queued), done) == (before + 1, [1])
        queued.pop()


def test_ranks_share_memory_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This checks only the names; tests/system/dist/test_gpus.py uses them on a GPU."""
    module = importlib.import_module("torch.distributed._symmetric_memory")
    assert {"dtype", "device"} <= inspect.signature(module.empty).parameters.keys()
    assert [*inspect.signature(module.rendezvous).parameters] == ["tensor", "group"]
    given: list[Any] = []

    class Met:
        def get_buffer(self, *asked: Any) -> Any:
            return asked

    monkeypatch.setattr(module, "empty", lambda *a, **k: given.append((a, k)))
    monkeypatch.setattr(module, "rendezvous", lambda *a: given.append(a) or Met())
    _torch.symmetric_memory(64, torch.device("cuda", 1))
    assert given == [((64,), {"dtype": torch.uint8, "device": torch.device("cuda", 1)})]
    memory = torch.empty(64, dtype=torch.uint8)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        assert _torch.symmetric_views(memory, group) == [(0, memory.shape, torch.uint8)]
        assert given[1] == (memory, group.group_name)
        assert hasattr(module._SymmetricMemory, "get_buffer")
    finally:
        torch.distributed.destroy_process_group()


# --- ranks ----------------------------------------------------------------------------------------


def test_the_flight_recorder_keeps_what_gloo_exchanged() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.distributed.all_reduce(torch.ones(3, 2))
        # Another thread retires the entry.
        deadline = time.monotonic() + 30
        while not (last := _torch.exchanges_issued()[-1])["retired"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        torch.distributed.destroy_process_group()
    assert last["profiling_name"] == "gloo:all_reduce"
    assert (last["input_dtypes"], last["input_sizes"]) == (["Float"], [[3, 2]])
    assert (last["process_group"][0], last["is_p2p"]) == ("0", False)
    assert last["collective_seq_id"] > 0


def test_a_supervised_agent_calls_back_before_it_reaps() -> None:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    steps = ("_monitor_workers", "_start_workers", "_stop_workers", "_rendezvous")
    assert all(callable(getattr(LocalElasticAgent, step)) for step in steps)
    # system/launch/test_launcher.py runs the agent. This test checks that torch's own loop calls
    # the replacements.
    assert "self._monitor_workers(" in inspect.getsource(LocalElasticAgent._invoke_run)
    assert "_torch.supervised_agent(" in (_SOURCE / "run/launch/launcher.py").read_text()


@pytest.mark.parametrize("op", WRITING)
def test_out_variants_have_a_kernel(op: str) -> None:
    """Otherwise the variant is the same.

    The variants of other operators run the plain operator and copy its result.
    """
    writing, keyword = WRITING[op]
    plain, told = (operator_named(name)._schema for name in (op, writing))
    assert [a.name for a in told.arguments if a.is_out] == [keyword]
    given = [(a.name, str(a.type)) for a in told.arguments if not a.is_out]
    assert given == [(a.name, str(a.type)) for a in plain.arguments]
    name = ".".join(filter(None, (told.name, told.overload_name)))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: TID251 - asked of this torch
    assert has_kernel(name, "CPU")


# --- state that a running step reads --------------------------------------------------------------


def test_a_profiler_is_on_from_its_warm_up_to_its_end() -> None:
    from torch.profiler import ProfilerActivity, profile, schedule

    kinds: dict[str, Any] = {"activities": [ProfilerActivity.CPU]}
    assert not _torch.profiler_is_on()
    for acc_events in (False, True):
        plan = schedule(wait=1, warmup=1, active=1, repeat=2)
        seen = profile(**kinds, schedule=plan, acc_events=acc_events)
        found = [_torch.profiler_is_on()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that events of earlier cycles are dropped
            with seen:
                for _ in range(7):
                    found.append(_torch.profiler_is_on())
                    torch.ones(2).add(1)
                    seen.step()
        found.append(_torch.profiler_is_on())
        assert found == [False, False, True, True, False, True, True, False, False]
    with torch.autograd.profiler.profile():
        assert _torch.profiler_is_on()
    assert not _torch.profiler_is_on()


def test_tensor_versions_reveal_in_place_writes() -> None:
    tensors = [torch.ones(2), torch.ones(2)]
    before = _torch.versions(tensors)
    tensors[1].mul_(2)
    first, second = _torch.versions(tensors)
    assert (first, second > before[1]) == (before[0], True)
    with torch.inference_mode():
        assert _torch.versions([torch.ones(2)]) == [0]


# --- operators that may multiply and have no FLOP formula

# One operator per line, followed by the versions of torch that have it if not all do, such as
# >=2.14 or <2.12.
_UNCOUNTED = Path(__file__).parent / "uncounted_operators.txt"


def _listed() -> list[str]:
    found = []
    for line in _UNCOUNTED.read_text().splitlines():
        name, *bounds = re.split("([<>]=?)", line)
        test = dict(zip(bounds[::2], map(minor_version, bounds[1::2]), strict=True))
        if test.get(">=", VERSION) <= VERSION and ("<" not in test or test["<"] > VERSION):
            found.append(name.strip())
    return found


def _uncounted() -> list[str]:
    x, found = torch.ones(2, 2), set()
    schemas = torch._C._jit_get_all_schemas()  # noqa: TID251 - what there is in this torch
    has_kernel = torch._C._dispatch_has_kernel  # noqa: TID251
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: TID251
    for schema in schemas:
        space, _, name = schema.name.partition("::")
        full = f"{schema.name}.{schema.overload_name}".rstrip(".")
        types = [str(a.type) for a in schema.arguments], [str(r.type) for r in schema.returns]
        is_out = name.endswith("_") or schema.overload_name.endswith("out")
        if space not in ("aten", "prims") or is_out or not has_kernel(full):
            continue
        # An implicitly composite operator is decomposed before it could be in a graph.
        if is_composite(full, "CompositeImplicitAutograd"):
            continue
        if all(any("Tensor" in t for t in some) for some in types):
            packet = getattr(getattr(torch.ops, space), name)
            target = getattr(packet, schema.overload_name or "default")
            if may_multiply_uncounted(target, (x,), {}, x):
                found.add(str(packet))
    return sorted(found)


def test_only_the_listed_torch_operators_lack_a_flop_formula() -> None:
    """A new release of torch has new operators.

    Give each a formula, list it as one that does not multiply, or add it here: ``python -m
    tests.torch.test_private_names`` prints them.
    """
    # This runs in a process of its own, because importing Inductor, as other tests do, registers
    # more operators.
    run = subprocess.run(
        [sys.executable, "-m", "tests.torch.test_private_names"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.split() == _listed(), run.stderr


if __name__ == "__main__":
    print(*_uncounted(), sep="\n")
