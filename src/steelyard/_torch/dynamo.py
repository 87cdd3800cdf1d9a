"""Dynamo internals: capture of a step as one graph, with guards on the values it read.

Not for AOTAutograd's export: see aot.py.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

# Tracing leaves fake tensors of the model in class attributes of this tracker; leaving its context
# removes them.
from torch._decomp.decompositions_for_rng import PhiloxStateTracker

from steelyard._torch.private_names import require
from steelyard.torch_version import minor_version

__all__ = [
    "Guarded",
    "PhiloxStateTracker",
    "capture_settings",
    "captured_and_guarded",
    "checkpoints",
    "functional_calls",
    "is_checkpointed",
    "quiet_logs",
]


@contextlib.contextmanager
def capture_settings(ignored_loggers: set[Callable[..., Any]]) -> Iterator[None]:
    """Patch Dynamo and dispatch for capture.

    Shapes are static, recurrent layers allowed, logging calls ignored, and hidden decompositions
    disabled. torch 2.13 applies some decompositions even if none are requested: the recurrent ones
    silently lose the dropout between layers, and bilinear resizing rounds differently from eager.
    Modules are imported again, because Dynamo would otherwise confuse two scripts of the same name.
    """
    require("dynamo")
    import torch._dynamo.symbolic_convert

    torch._dynamo.symbolic_convert._import_module.cache_clear()
    with (
        quiet_logs(),
        _dynamo_config(ignored_loggers),
        _without_hidden_decompositions(),
        _without_mkldnn(),
        _intermediates_may_require_grad(),
    ):
        yield


@dataclass(frozen=True, slots=True)
class Guarded:
    """Dynamo's result for a step: its graph module for export, and guards on the values it read.

    These are the guards that make ``torch.compile`` recompile, one for every value that the traced
    code read. ``broken`` returns a guard that no longer holds, or an empty text. Guards on the
    batch, on torch's modes and on the layout of tensors are excluded; ``tensors`` and ``of_batch``
    list the names of tensors and of batch guards. ``find`` returns a function that looks up the
    current value of a name.
    """

    graph: Any
    broken: Callable[[], str]
    tensors: Mapping[str, torch.Tensor]
    of_batch: frozenset[str]
    find: Callable[[str], Callable[[], Any]]
    draws_in_python: bool


def captured_and_guarded(step: torch.nn.Module, batch: Any) -> Guarded:
    """Capture a step as a graph with guards; public functions return only one of the two."""
    require("dynamo")
    import torch._dynamo.convert_frame
    import torch._dynamo.functional_export
    import torch._dynamo.hooks
    import torch._export.utils

    dynamo = torch._dynamo
    tensors: dict[str, torch.Tensor] = {}
    of_batch: set[str] = set()

    def filter_guards(entries: Sequence[Any]) -> list[bool]:
        for entry in entries:
            if re.match(r"batch\b|L\['batch'\]", entry.name):
                of_batch.add(entry.name.replace("L['batch']", "batch"))
            elif entry.guard_type == "TENSOR_MATCH":
                tensors[entry.name] = entry.value
        return [
            entry.name != ""
            and re.match(r"batch\b|L\['batch'\]", entry.name) is None
            and entry.guard_type not in _TENSOR_FORM_GUARDS
            and not (_MODEL_PATH in entry.name and entry.guard_type == "EMPTY_NN_MODULE_HOOKS_DICT")
            and ".stateless._functional_call" not in entry.name  # differs during tracing
            for entry in entries
        ]

    with (
        functional_calls(),
        torch._export.utils._compiling_state_context(),
        dynamo.config.patch(replay_side_effects=False, side_effect_replay_policy="warn"),
        dynamo.utils.get_metrics_context(),
        dynamo.utils.dynamo_timed("fullgraph_capture"),
    ):
        # The graph stays in this process, so models that write another graph for export
        # (transformers' masks) should not do so.
        torch.compiler._is_exporting_flag = False
        captured = dynamo.convert_frame.fullgraph_capture(step, (batch,), {})
        guards = captured.graph_capture_output.build_guards(
            type(step).forward.__code__, hooks=dynamo.hooks.Hooks(guard_filter_fn=filter_guards)
        ).guard_manager
    scope = {"self": step}

    def broken() -> str:
        if guards.check(scope):
            return ""
        return str(next(iter(guards.check_verbose(scope).verbose_code_parts), "a guard"))

    found = type(step).forward.__globals__
    names = {**(guards.closure_vars or {}), "G": found, "self": step}
    names["___from_numpy"] = lambda value: value

    def find(name: str) -> Callable[[], Any]:
        return FunctionType(compile(name, "<a guard>", "eval"), names)

    build = dynamo.functional_export.create_fx_graph_from_captured_output
    graph = build(captured, step, (batch,), {})
    # Guards need only the modules among the globals; the rest would keep every fake tensor alive.
    draws = any(name.startswith("__gen_rand_values") for name in found)
    for name in [name for name in found if name.startswith("__compiled_fn")]:
        del found[name]
    return Guarded(graph, broken, tensors, frozenset(of_batch), find, draws)


# run/model_guards.py watches the hooks of the model; modules that the loss contains need guards.
_MODEL_PATH = "self._modules['model']"


@contextlib.contextmanager
def functional_calls() -> Iterator[None]:
    """Make ``torch.func.functional_call`` write only changed tensors into the dict it was given.

    Unpatched, it writes every tensor back, mostly unchanged, and Dynamo counts each write as a
    side effect. Writes are undone at the end, unless Dynamo traced them.
    """
    stateless = torch.nn.utils.stateless
    original = stateless._functional_call
    written: list[tuple[dict[str, torch.Tensor], str, torch.Tensor]] = []

    def functional_call(
        module: torch.nn.Module, tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        given = dict(tensors)
        result = original(module, given, *args, **kwargs)
        for name, tensor in given.items():
            if tensor is not tensors[name]:
                if not torch.compiler.is_compiling():
                    written.append((tensors, name, tensors[name]))
                tensors[name] = tensor
        return result

    stateless._functional_call = functional_call  # type: ignore[assignment]  # restored below
    try:
        yield
    finally:
        stateless._functional_call = original
        for tensors, name, tensor in reversed(written):
            tensors[name] = tensor


# Guards on the layout of tensors and on their aliasing, which run/binding.py and
# run/model_guards.py check instead.
_TENSOR_FORM_GUARDS = {"TENSOR_MATCH", "DUPLICATE_INPUT", "SHAPE_ENV"}


@contextlib.contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Disable mkldnn, whose fused LSTM cannot be run from a graph.

    (The public switch warns about Intel GPUs.)
    """
    enabled = bool(torch._C._get_mkldnn_enabled())
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


_HIDDEN_DECOMPOSITIONS = (
    *(f"{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    *(
        f"upsample_{kind}.{overload}"
        for kind in (
            *("linear1d", "bilinear2d", "bicubic2d", "trilinear3d"),
            *("nearest1d", "nearest2d", "nearest3d"),
        )
        for overload in ("vec", "default")
    ),
)


@contextlib.contextmanager
def _without_hidden_decompositions() -> Iterator[None]:
    removed = []
    try:
        for name in _HIDDEN_DECOMPOSITIONS:
            packet, overload = name.split(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload)
            for key in (
                torch._C.DispatchKey.Autograd,
                torch._C.DispatchKey.CompositeImplicitAutograd,
            ):
                kernel = operator.py_kernels.pop(key, None)
                if kernel is not None:
                    removed.append((operator, key, kernel))
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, key, kernel in removed:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Suppress stack traces that torch logs.

    One is that of a failed shape check, which would precede our own refusal; the other that of
    torch 2.11, which cannot write down the ignored loggers.
    """
    names = ("torch._subclasses.fake_tensor", "torch._dynamo.metrics_context")
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _dynamo_config(
    ignored_loggers: set[Callable[..., Any]],
) -> contextlib.AbstractContextManager[Any]:
    import torch._dynamo

    older: dict[str, Any] = {
        # torch 2.11 decomposes x.add_(y, alpha=a), which rounds differently from eager.
        "enable_dynamo_decompositions": False,
        # torch 2.11 assumes that a list of constants in a default argument cannot change.
        "skip_guards_on_constant_func_defaults": False,
    }
    patched: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(
        **(older if minor_version(torch.__version__) < (2, 12) else {}),
        ignore_logging_functions=ignored_loggers,
        allow_rnn=True,
        assume_static_by_default=True,
        automatic_dynamic_shapes=False,
        specialize_float=True,
        use_numpy_random_stream=True,
        skip_nnmodule_hook_guards=False,
    )
    return patched


@contextlib.contextmanager
def _intermediates_may_require_grad() -> Iterator[None]:
    """Let the forward pass call ``requires_grad_()`` on intermediate tensors.

    ``enable_input_require_grads()`` of transformers and PEFT does this to differentiate
    checkpointed blocks of a frozen model. Dynamo (torch 2.12 and newer) refuses it if a result
    depends on such a tensor, whose gradient it could not return. A step needs only gradients of
    parameters, which this call does not change. (torch 2.11 refuses the call itself.)
    """
    from torch._dynamo.output_graph import OutputGraph

    name = "_check_requires_grad_intermediate_outputs"
    check = getattr(OutputGraph, name, None)
    if check is None:
        yield
        return
    setattr(OutputGraph, name, lambda *_: None)
    try:
        yield
    finally:
        setattr(OutputGraph, name, check)


def checkpoints(step: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Return the ``torch.utils.checkpoint`` calls in Dynamo's graph and its subgraphs."""
    modules = (m for m in step.modules() if isinstance(m, torch.fx.GraphModule))
    nodes = (node for module in modules for node in module.graph.nodes)
    operator = torch.ops.higher_order.tag_activation_checkpoint
    return [node for node in nodes if node.target is operator]


def is_checkpointed(node: torch.fx.Node) -> bool:
    """True if a node of the joint graph comes from a region that eager PyTorch would recompute.

    torch 2.11 also marks regions without gradients, which eager PyTorch does not recompute.
    """
    return "ac_graph_id" in node.meta
