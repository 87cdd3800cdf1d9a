"""Traces a user's model and loss, forward and backward, into one functional fx graph.

Dynamo runs first, because only it knows module paths and source lines. Then AOTAutograd exports the
joint graph, whose descriptors name every input and output. All tensors are fake. Not for
converting the result to plain data: see to_ir.py.
"""

import ast
import contextlib
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.checks.activation_checkpointing import (
    refuse_reentrant_without_gradient,
    refuse_repeated_draws,
    refuse_repeated_writes,
)
from steelyard.capture.checks.errors import (
    check_scalar,
    drawn_by_python,
    no_loss,
    reading_errors,
    shortened,
)
from steelyard.capture.checks.loss_inputs import name_of_cell
from steelyard.capture.checks.python_state_guards import StateGuards
from steelyard.capture.tracing.source_lines import clean_path
from steelyard.errors import CaptureRefused
from steelyard.ir.graph import Output, OutputKind, Role
from steelyard.torch_version import minor_version

Decompositions = dict[Any, Callable[..., Any]]
Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """The name and role of one placeholder of the fx graph."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The joint graph, its inputs by placeholder name, and its outputs.

    ``constants`` holds the live tensors that are not parameters, buffers or part of the batch.
    ``missing`` names trainable parameters for which the graph has no gradient.
    """

    joint: torch.fx.GraphModule
    placeholders: dict[str, Placeholder]
    outputs: tuple[Output, ...]
    constants: dict[str, torch.Tensor]
    missing: tuple[str, ...]
    reads: StateGuards


class _StepModule(nn.Module):
    """The whole step as one module, so that Dynamo traces the loss too."""

    loss: Loss

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.__dict__["loss"] = loss

    def forward(self, batch: Any) -> Any:
        return self.loss(self.model, batch)


class _StepModuleOfMethod(_StepModule):
    """A step whose loss is a bound method, held as a function and its object.

    Dynamo (torch 2.11) has no guards on the default arguments of a method that a module holds.
    """

    loss_function: Callable[..., Any]
    loss_self: Any

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__(model, loss)
        method: Any = loss
        self.__dict__["loss_function"] = method.__func__
        self.__dict__["loss_self"] = method.__self__

    def forward(self, batch: Any) -> Any:
        return self.loss_function(self.loss_self, self.model, batch)


def _step(model: nn.Module, loss: Loss) -> _StepModule:
    """Return the step as a module whose forward has its own globals.

    Dynamo (torch 2.13) stores objects for its guards among the globals of the traced function, and
    they are never removed. With separate globals they are freed together with the trace.
    """
    is_unguarded = isinstance(loss, MethodType) and minor_version(torch.__version__) < (2, 12)
    base = _StepModuleOfMethod if is_unguarded else _StepModule
    forward = FunctionType(base.forward.__code__, {"__builtins__": __builtins__}, "forward")
    module_class = type("_StepModule", (base,), {"forward": forward})
    step: _StepModule = module_class(model, loss)
    return step


def trace(model: nn.Module, loss: Loss, batch: Any, *, decompositions: Decompositions) -> Trace:
    leaves, spec = _torch.tree_flatten(batch)
    # Copy it, because a tensor under two keys would be traced as a single input.
    distinct = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
    batch = _torch.tree_unflatten(distinct, spec)
    settings = _torch.capture_settings(_ignored_loggers())
    with (
        reading_errors(model) as progress,
        torch.enable_grad(),
        settings,
        _restoring_tensors(model),
    ):
        step, buffers_changed, reads = _dynamo(model, loss, batch)
        progress.step = step
        refuse_reentrant_without_gradient(step)
        with _torch.PhiloxStateTracker(), contextlib.ExitStack() as stack:
            exported = _torch.aot_export_joint_with_descriptors(
                stack, step, (batch,), decompositions=decompositions
            )
        # The stack is closed here: otherwise the export's fake mode would affect later user code.
    traced = _build_trace(exported.graph_module, step, model, batch, reads)
    _check_buffers(model, traced, buffers_changed)
    names = {name: placeholder.name for name, placeholder in traced.placeholders.items()}
    refuse_repeated_writes(traced.joint, traced.outputs, names)
    refuse_repeated_draws(step, traced.joint)
    return traced


def _ignored_loggers() -> set[Callable[..., Any]]:
    """Return the logging functions that tracing may skip; transformers adds some of its own."""
    names = ("debug", "info", "warning", "warning_once", "warning_advice", "info_once")
    found = {getattr(logging.Logger, name, None) for name in names}
    return {warnings.warn, *(f for f in found if f is not None)}


@contextlib.contextmanager
def _restoring_tensors(model: nn.Module) -> Iterator[None]:
    """Restore every parameter and buffer in its module after tracing.

    If one module is registered under two names, torch 2.13 leaves a traced tensor behind.
    """
    tables: list[dict[str, Any]] = []
    for module in model.modules():
        tables += [module._parameters, module._buffers]
    slots = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, saved in slots:
            if any(table.get(name) is not tensor for name, tensor in saved.items()):
                table.update(saved)


def _dynamo(model: nn.Module, loss: Loss, batch: Any) -> tuple[Any, list[str], StateGuards]:
    """Run Dynamo; return its graph, the modules with replaced buffers, and the state that was
    read.
    """
    whole = _step(model, loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _torch.captured_and_guarded(whole, batch)
    step = found.graph
    # Dynamo's table of symbolic shapes would outlive the model, and shapes are static here.
    step.meta["fake_mode"].shape_env.tracked_fakes = None
    _replace_data_by_detach(step)
    _name_closures(step, loss)
    changed = [s for w in caught for s in side_effects(str(w.message))]
    buffers = [s.removesuffix("._buffers") for s in changed if s.endswith("._buffers")]
    # Swapped parameters are restored, as the eager baseline has checked (functional_call swaps).
    others = [s for s in changed if not s.endswith(("._buffers", "._parameters"))]
    if others:
        raise _changes_state(", ".join(others))
    if found.draws_in_python:
        raise drawn_by_python()
    return step, buffers, StateGuards(found, model=model, batch=batch)


def _replace_data_by_detach(step: Any) -> None:
    """Replace ``.data`` of weights and constants by the equivalent ``detach()``.

    Export (torch 2.13) cannot trace ``.data`` of a parameter that is not the model's.
    """
    for node in step.graph.nodes:
        if _torch.reads_data(node) and node.args[0].op == "placeholder":
            node.op, node.target = "call_method", "detach"
    step.recompile()


def _name_closures(step: Any, loss: Loss) -> None:
    """Name the modules in the loss function's closure after their variables."""
    cell = re.compile(r"\bloss(?:\.__func__)?\.__closure__\[(\d+)\]\.cell_contents")

    def named(found: re.Match[str]) -> str:
        return ".".join(filter(None, ("loss", name_of_cell(loss, int(found[1])))))

    for node in step.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {
                key: (cell.sub(named, path), kind) for key, (path, kind) in stack.items()
            }


def _changes_state(what: str) -> CaptureRefused:
    return CaptureRefused(
        shortened(f"the forward pass has side effects on Python state: {what}"),
        expected="a forward pass and hooks without side effects, which a captured step "
        "could not repeat",
        remedy="move the change out of forward or remove the hook, then plan again",
    )


def side_effects(warning: str) -> list[str]:
    """Return the Python objects that the forward pass changes, according to Dynamo's warning.

    Context variables are left out: transformers sets and resets one around each forward, so there
    is nothing for a captured step to repeat.
    """
    if "side effects happened" not in warning:
        return []
    listed: list[str] = ast.literal_eval(warning[warning.index("[") :])
    names = []
    for source in listed:
        module = re.fullmatch(r"G\['__import_(\w+)'\]\.(\w+)", source)
        if module is not None:
            owner = sys.modules.get(module[1].replace("_dot_", "."))
            if "ContextVar" in type(getattr(owner, module[2], None)).__name__:
                continue
        source = re.sub(r"^G\['__import_(\w+)'\]\.", _module_prefix, source)
        hook = re.match(r"(.*?)\._forward_(pre_)?hooks", source)
        named = f"a forward hook of {clean_path(hook[1])}" if hook else clean_path(source)
        names.append("an attribute of the model" if named == "model" else named or "the batch")
    return names


def _module_prefix(found: re.Match[str]) -> str:
    name = found[1].replace("_dot_", ".").strip("_")
    return "" if name == "main" else f"{name}."


def _check_buffers(model: nn.Module, trace: Trace, changed: list[str]) -> None:
    """Refuse replaced buffers: in-place writes become updates, but a replacement would be lost."""
    updated = {o.target for o in trace.outputs if o.kind is OutputKind.UPDATE}
    for path in changed:
        module = model.get_submodule(path.removeprefix("model").lstrip("."))
        head = path.removeprefix("model").lstrip(".")
        names = [f"buffer:{head}.{n}".replace(":.", ":") for n in module._buffers]
        if not any(name in updated for name in names):
            raise _changes_state(f"buffers of {path} are replaced")


def _build_trace(
    joint: torch.fx.GraphModule, step: Any, model: nn.Module, batch: Any, reads: StateGuards
) -> Trace:
    """Build the trace, naming inputs and outputs by their descriptors, never by position."""
    names = _NamesOfTensors(step, model)
    batch_names = [
        f"batch:{_torch.keystr(path)}" for path, _ in _torch.tree_flatten_with_path(batch)[0]
    ]
    placeholders: dict[str, Placeholder] = {}
    by_descriptor: dict[str, str] = {}
    trainable: dict[str, str] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        descriptor = node.meta["desc"]
        match descriptor:
            case _torch.ParamAOTInput() | _torch.BufferAOTInput():
                placeholder = names.of(descriptor.target)
            case _torch.PlainAOTInput():
                placeholder = Placeholder(name=batch_names[descriptor.idx], role=Role.BATCH)
            case _torch.TangentAOTInput():
                placeholder = Placeholder(name="tangent", role=Role.TANGENT)
            case _:
                raise _unknown_input(descriptor)
        placeholders[node.name] = placeholder
        by_descriptor[str(descriptor)] = placeholder.name
        if placeholder.role is Role.PARAMETER and names.is_trainable(placeholder.name):
            trainable.setdefault(placeholder.name, node.name)
    outputs, with_gradient = _outputs(joint, by_descriptor, names)
    if not with_gradient:
        raise CaptureRefused(
            "no trainable parameter has a gradient",
            expected="a loss that depends on at least one parameter with requires_grad",
            remedy="check requires_grad of the parameters and that the loss uses the model",
        )
    return Trace(
        joint=joint,
        placeholders=placeholders,
        outputs=outputs,
        constants=names.constants,
        missing=tuple(sorted(set(trainable) - with_gradient)),
        reads=reads,
    )


def _unknown_input(descriptor: Any) -> CaptureRefused:
    if "Token" in type(descriptor).__name__:
        return CaptureRefused(
            "the step has operators that check their result or must run in order",
            expected="operators without side effects, which may be moved and rerun",
            remedy="use unchecked operators (torch.linalg.cholesky_ex for cholesky), then plan "
            "again",
        )
    return CaptureRefused(
        f"the step has an input of an unknown kind: {descriptor}",
        expected="parameters, buffers, constants and the batch",
        remedy="report this model, with its loss function",
    )


def _outputs(
    joint: torch.fx.GraphModule, by_descriptor: dict[str, str], names: "_NamesOfTensors"
) -> tuple[tuple[Output, ...], set[str]]:
    node = joint.graph.output_node()
    outputs: list[Output] = []
    with_gradient: set[str] = set()
    for value, descriptor in zip(_results(node), node.meta["desc"], strict=True):
        if value is None or descriptor is None:
            continue
        match descriptor:
            case _torch.PlainAOTOutput():
                outputs.append(Output(kind=OutputKind.LOSS, node=value.name))
            case _torch.GradAOTOutput():
                target = by_descriptor[str(descriptor.grad_of)]
                if names.is_trainable(target):
                    with_gradient.add(target)
                    outputs.append(Output(kind=OutputKind.GRADIENT, node=value.name, target=target))
            case _torch.InputMutationAOTOutput():
                target = by_descriptor[str(descriptor.mutated_input)]
                _check_written(target)
                outputs.append(Output(kind=OutputKind.UPDATE, node=value.name, target=target))
            case _:
                raise CaptureRefused(
                    f"the step has a result of an unknown kind: {descriptor}",
                    expected="a loss, gradients and new values of buffers",
                    remedy="return only the scalar loss from the loss function",
                )
    losses = [o for o in outputs if o.kind is OutputKind.LOSS]
    _check_loss(joint, losses)
    return tuple(outputs), with_gradient


def _check_written(target: str) -> None:
    kind, _, name = target.partition(":")
    if kind != "buffer":
        raise CaptureRefused(
            f"the forward pass writes into {'the batch: ' if kind == 'batch' else ''}{name}",
            expected="a forward pass that writes only into buffers and its own activations",
            remedy="write into a copy (.clone()), or register the tensor as a buffer",
        )


def _results(output: torch.fx.Node) -> list[torch.fx.Node | None]:
    results = output.args[0]
    assert isinstance(results, (list, tuple))
    return [r if isinstance(r, torch.fx.Node) else None for r in results]


def _check_loss(joint: torch.fx.GraphModule, losses: list[Output]) -> None:
    if len(losses) != 1:
        raise no_loss(f"{len(losses)} tensors")
    check_scalar(next(n for n in joint.graph.nodes if n.name == losses[0].node).meta["val"])


class _NamesOfTensors:
    """The user's names for the tensors that Dynamo lifted to inputs."""

    def __init__(self, step: Any, model: nn.Module) -> None:
        self._step_parameters = dict(step.named_parameters(remove_duplicate=False))
        self._step_buffers = dict(step.named_buffers(remove_duplicate=False))
        self._parameters = {id(p): name for name, p in reversed([*model.named_parameters()])}
        self._buffers = {id(b): name for name, b in reversed([*model.named_buffers()])}
        self._trainable = {n for n, p in model.named_parameters() if p.requires_grad}
        self.constants: dict[str, torch.Tensor] = {}

    def of(self, target: str) -> Placeholder:
        tensor = self._step_parameters.get(target)
        if tensor is None:
            tensor = self._step_buffers[target]
        if id(tensor) in self._parameters:
            return Placeholder(
                name=f"parameter:{self._parameters[id(tensor)]}", role=Role.PARAMETER
            )
        if id(tensor) in self._buffers:
            return Placeholder(name=f"buffer:{self._buffers[id(tensor)]}", role=Role.BUFFER)
        if tensor.requires_grad:
            raise CaptureRefused(
                f"the loss uses a trainable tensor that is not in the model: {target}",
                expected="every trained tensor to be a parameter of the model",
                remedy="register it in the model, or set requires_grad=False on it",
            )
        name = f"constant:{target}"
        self.constants[name] = tensor
        return Placeholder(name=name, role=Role.CONSTANT)

    def is_trainable(self, name: str) -> bool:
        kind, _, rest = name.partition(":")
        return kind == "parameter" and rest in self._trainable
