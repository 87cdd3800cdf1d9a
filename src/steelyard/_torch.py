"""Every private torch name that Steelyard uses, and why; each has a canary in tests/test_torch.py.

The one file that may import them. Not for logic: names, thin wrappers, nothing that decides.

What captures and compiles is imported where it is called: Dynamo alone takes longer to import than
the rest of torch, and ranks, measuring processes and hooks have no use for it.
"""

import contextlib
import gc
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch

# Memory of GPUs that the processes of a host share; torch has no public name for it yet.
import torch.distributed._symmetric_memory

# Tracing leaves fake tensors of the model in this tracker's class attributes; leaving it as a
# context takes them back.
from torch._decomp.decompositions_for_rng import PhiloxStateTracker

# What inputs and outputs of a captured step are.
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

# The type of operators that can be named and called again (higher-order ones cannot).
from torch._ops import OpOverload

# Planning computes nothing: shapes, strides and storages come from fake tensors.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# Pytrees with key paths; the public torch.utils pytree has no stable alias in 2.13.
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from steelyard.private_files import make_private

__all__ = [
    "BufferAOTInput",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "OpOverload",
    "ParamAOTInput",
    "PhiloxStateTracker",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "TorchDispatchMode",
    "accumulators",
    "any_hooks",
    "aot_export_joint_with_descriptors",
    "argument",
    "below_autograd",
    "builtin_of",
    "capture_settings",
    "captured_and_guarded",
    "checkpoints",
    "compiled",
    "compiled_kernels",
    "cpp_compiler",
    "cpp_errors",
    "draws",
    "dtensor_strategies",
    "exchanges_issued",
    "functional_calls",
    "hooks_of_all_modules",
    "inductor_compiled",
    "inductor_decompositions",
    "inductor_lowered",
    "inductor_settings",
    "is_checkpointed",
    "is_engine",
    "is_view",
    "keep_busy",
    "keystr",
    "mutates",
    "on_meta",
    "profiler_is_on",
    "quiet_logs",
    "reads_data",
    "storage_key",
    "supervised_agent",
    "symmetric_memory",
    "symmetric_views",
    "taken_apart",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "versions",
    "when_cuda_begins",
]


@contextlib.contextmanager
def capture_settings(ignored_loggers: set[Callable[..., Any]]) -> Iterator[None]:
    """Dynamo and dispatch as capture needs them, for a while.

    Static shapes, recurrent layers allowed, logging left out, and no hidden decompositions: torch
    2.13 applies some even where none are asked for, of which the recurrent ones lose the dropout
    between layers without a word, and bilinear resizing rounds otherwise than eager does. Modules
    are looked up anew: of two scripts of one name Dynamo would know the first for good.
    """
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
    """What Dynamo made of a step: its graph module for export, and what it saw being read.

    The guards are those by which ``torch.compile`` decides to compile anew: of every value that
    the traced code read. ``broken`` answers which of them no longer holds, or nothing. Left out
    are those of the batch, of torch's modes and of the form of tensors; those come by the names of
    guards in ``tensors`` and ``of_batch``. ``find`` looks a name up, as it is now.
    """

    graph: Any
    broken: Callable[[], str]
    tensors: Mapping[str, torch.Tensor]
    of_batch: frozenset[str]
    find: Callable[[str], Callable[[], Any]]
    draws_in_python: bool


def captured_and_guarded(step: torch.nn.Module, batch: Any) -> Guarded:
    """Public names give one or the other, graph or guards."""
    import torch._dynamo.convert_frame
    import torch._dynamo.functional_export
    import torch._dynamo.hooks
    import torch._export.utils

    dynamo = torch._dynamo
    tensors: dict[str, torch.Tensor] = {}
    of_batch: set[str] = set()

    def kept(entries: Sequence[Any]) -> list[bool]:
        for entry in entries:
            if re.match(r"batch\b|L\['batch'\]", entry.name):
                of_batch.add(entry.name.replace("L['batch']", "batch"))
            elif entry.guard_type == "TENSOR_MATCH":
                tensors[entry.name] = entry.value
        return [
            entry.name != ""
            and re.match(r"batch\b|L\['batch'\]", entry.name) is None
            and entry.guard_type not in _GUARDS_OF_FORM
            and not (_OF_MODEL in entry.name and entry.guard_type == "EMPTY_NN_MODULE_HOOKS_DICT")
            and ".stateless._functional_call" not in entry.name  # another one, while tracing
            for entry in entries
        ]

    with (
        functional_calls(),
        torch._export.utils._compiling_state_context(),
        dynamo.config.patch(replay_side_effects=False, side_effect_replay_policy="warn"),
        dynamo.utils.get_metrics_context(),
        dynamo.utils.dynamo_timed("fullgraph_capture"),
    ):
        # Nothing leaves this process: models that write another graph for export (transformers'
        # masks) should not.
        torch.compiler._is_exporting_flag = False
        captured = dynamo.convert_frame.fullgraph_capture(step, (batch,), {})
        guards = captured.graph_capture_output.build_guards(
            type(step).forward.__code__, hooks=dynamo.hooks.Hooks(guard_filter_fn=kept)
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
    # Guards look among the globals for modules only; the rest would keep every fake tensor alive.
    draws = any(name.startswith("__gen_rand_values") for name in found)
    for name in [name for name in found if name.startswith("__compiled_fn")]:
        del found[name]
    return Guarded(graph, broken, tensors, frozenset(of_batch), find, draws)


# Its hooks are watched by run/model_guards.py; a module that the loss holds has no one else.
_OF_MODEL = "self._modules['model']"


@contextlib.contextmanager
def functional_calls() -> Iterator[None]:
    """Let ``torch.func.functional_call`` write into the dict that it was given only what changed.

    Of itself it writes every tensor back, mostly those that are there; yet Dynamo counts each
    write as a side effect. What it did write is taken back at the end, unless Dynamo traced it.
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

    stateless._functional_call = functional_call  # type: ignore[assignment]  # for a while
    try:
        yield
    finally:
        stateless._functional_call = original
        for tensors, name, tensor in reversed(written):
            tensors[name] = tensor


# Of whether tensors are the same kind, and whether two are one: bind.py and watch.py see to that.
_GUARDS_OF_FORM = {"TENSOR_MATCH", "DUPLICATE_INPUT", "SHAPE_ENV"}


@contextlib.contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Its fused LSTM cannot be run from a graph. (The public switch warns about Intel GPUs.)"""
    enabled = bool(torch._C._get_mkldnn_enabled())
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


_HIDDEN = (
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
        for name in _HIDDEN:
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
    """Torch's own stack trace of a failed shape check would come before our refusal does."""
    noisy = logging.getLogger("torch._subclasses.fake_tensor")
    level = noisy.level
    noisy.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        noisy.setLevel(level)


def _dynamo_config(
    ignored_loggers: set[Callable[..., Any]],
) -> contextlib.AbstractContextManager[Any]:
    import torch._dynamo

    patched: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(
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
    """Let the forward pass call ``requires_grad_()`` on what it computes, for a while.

    ``enable_input_require_grads()`` of transformers and PEFT does, so that checkpointed blocks of a
    frozen model are differentiated. Dynamo (torch 2.13) refuses it where a result depends on such a
    tensor, whose gradient it could not hand out. Of a step only gradients of parameters are asked
    for, which do not change by it.
    """
    from torch._dynamo.output_graph import OutputGraph

    name = "_check_requires_grad_intermediate_outputs"
    check = getattr(OutputGraph, name)
    setattr(OutputGraph, name, lambda *_: None)
    try:
        yield
    finally:
        setattr(OutputGraph, name, check)


def aot_export_joint_with_descriptors(*args: Any, **kwargs: Any) -> Any:
    """Forward and backward pass in one graph whose inputs and outputs say what they are: matching
    them by position went silently wrong."""
    from torch._functorch import aot_autograd

    return aot_autograd.aot_export_joint_with_descriptors(*args, **kwargs)


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Call operators without recording them for autograd: the program holds its own backward."""
    guard: contextlib.AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


def builtin_of(operator: Callable[..., Any]) -> Callable[..., Any]:
    """What calling an operator calls in the end, without the Python in between."""
    return operator._op if isinstance(operator, OpOverload) else operator


def mutates(operator: OpOverload) -> bool:
    """Whether an operator writes into an argument, as its schema says."""
    arguments = operator._schema.arguments
    return any(a.alias_info is not None and a.alias_info.is_write for a in arguments)


# Parameters' own hooks, which a step without autograd has to run itself; no public way to ask.
_HOOKS = attrgetter("_backward_hooks")
_LATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")


def accumulators(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """The autograd nodes that add to ``.grad``; held, they are the ones that a user would find."""
    with torch.inference_mode(mode=False):
        return [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]


def any_hooks(parameters: Sequence[torch.Tensor], nodes: Sequence[Any] | None = None) -> bool:
    """Whether some parameter has tensor hooks or post-accumulate-grad hooks, or its accumulator
    hooks of its own; ``nodes`` are the accumulators, where somebody holds them.
    """
    if any(map(_HOOKS, parameters)) or any(map(_LATE_HOOKS, parameters)):
        return True
    if nodes is None:
        nodes = accumulators([p for p in parameters if p.requires_grad])
    # A node does not list its hooks, but it shows the garbage collector the dicts they lie in.
    return any(gc.get_referents(*nodes))


def hooks_of_all_modules() -> dict[str, dict[int, Any]]:
    """The live registers of hooks that run for every module there is, by kind of hook."""
    from torch.nn.modules import module

    return {
        "forward hook": module._global_forward_hooks,
        "forward pre-hook": module._global_forward_pre_hooks,
        "backward hook": module._global_backward_hooks,
        "backward pre-hook": module._global_backward_pre_hooks,
    }


def draws(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call takes random numbers; attention without dropout is tagged so, wrongly.

    Torch's own operators say so by a tag. Those of others need not, and are taken to draw.
    """
    if operator.namespace not in _TAGGED:
        return True
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    dropout = argument(operator, args, kwargs, "dropout_p")
    return dropout is None or bool(dropout)


def argument(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *names: str
) -> Any:
    """What a call gives for the parameter of one of these names; None where there is none."""
    for place, parameter in enumerate(operator._schema.arguments):
        if parameter.name in names:
            given = args[place] if place < len(args) else kwargs.get(parameter.name)
            return parameter.default_value if given is None else given
    return None


# The namespaces (torch 2.13) whose operators carry the tag where they draw; and ours.
_TAGGED = {
    *("aten", "prims", "prim", "profiler", "mkldnn", "mkl", "mkldnn_prepacked", "onednn"),
    *("_c10d_functional", "_c10d_functional_autograd", "c10d", "inductor", "steelyard"),
}


def dtensor_strategies(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[list[tuple[str, int]]]:
    """The placements of results and tensors that DTensor knows for a call on one mesh axis.

    Each as a word and a dim: whole, shard, sum, or other. ``args`` hold (shape, stride, dtype) for
    tensors. Empty where it has no rule, or one that rewrites sizes among the arguments itself.
    """
    # Imports torch.distributed, which nobody else needs who plans for one device.
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    table = DTensor._op_dispatcher.sharding_propagator
    rule = table.op_single_dim_strategy_funcs.get(operator)
    if (
        rule is None
        or operator in table.op_to_shape_and_stride_idx
        or operator in table.op_to_scalar_shape_adjuster
    ):
        return []

    def described(value: Any) -> Any:
        if isinstance(value, MetaTensor):
            return TensorMeta(torch.Size(value.shape), value.stride, value.dtype)
        return [described(v) for v in value] if isinstance(value, list) else value

    def word(placement: Any) -> tuple[str, int]:
        if placement is None or isinstance(placement, Replicate):
            return "whole", 0
        if type(placement) is Partial:
            return ("sum", 0) if placement.reduce_op == "sum" else ("other", 0)
        dim = getattr(placement, "dim", None)
        return ("shard", dim) if isinstance(dim, int) else ("other", 0)

    found = rule.func(
        operator, tuple(map(described, args)), {key: described(v) for key, v in kwargs.items()}
    )
    return [[word(placement) for placement in strategy] for strategy in found]


@dataclass(frozen=True, slots=True)
class MetaTensor:
    """A tensor among the arguments of a call that nobody carries out."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def is_engine(frame: FrameType) -> bool:
    """Whether this is what runs a backward pass: above it are the operators that autograd calls."""
    return frame.f_code is torch.autograd.graph._engine_run_backward.__code__


def reads_data(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's graph is ``tensor.data``, which has no public function."""
    return node.target is torch._C._autograd._get_data_attr  # type: ignore[attr-defined]  # no stub


def checkpoints(step: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The calls of ``torch.utils.checkpoint`` in Dynamo's graph, and in those that it calls."""
    modules = (m for m in step.modules() if isinstance(m, torch.fx.GraphModule))
    nodes = (node for module in modules for node in module.graph.nodes)
    operator = torch.ops.higher_order.tag_activation_checkpoint
    return [node for node in nodes if node.target is operator]


def is_checkpointed(node: torch.fx.Node) -> bool:
    """Whether a node of the joint graph comes of what eager PyTorch would run again."""
    return "ac_graph_id" in node.meta


def is_view(operator: OpOverload) -> bool:
    """Whether an operator only looks at its first argument's storage, as its schema says."""
    returned = operator._schema.returns
    return bool(returned) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returned
    )


def on_meta(fake: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same layout, as a FakeTensor is made of, whatever modes are at work."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")


def storage_key(tensor: torch.Tensor) -> int:
    """Which storage a tensor lies on, as a number that two aliases share."""
    return int(tensor.untyped_storage()._cdata)


# Inductor takes seconds to import, and is private from its name on: only where it is asked for.
def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's own table, without those that draw random numbers its own way."""
    import torch._inductor.config
    import torch._inductor.decomposition
    import torch._inductor.lowering  # which the decomposition of pooling reads and nobody imports

    with torch._inductor.config.patch(fallback_random=True):
        found: dict[Any, Callable[..., Any]] = torch._inductor.decomposition.select_decomp_table()
    return found


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use on the CPU; None where there is none."""
    import torch._inductor.cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return str(torch._inductor.cpp_builder.get_cpp_compiler())
    except InvalidCxxCompiler:
        return None


def cpp_errors() -> tuple[type[BaseException], ...]:
    """What Inductor raises where the C++ compiler fails."""
    import torch._inductor.exc

    return (torch._inductor.exc.CppCompileError,)


@contextlib.contextmanager
def inductor_settings() -> Iterator[Any]:
    """Inductor as the runner needs it, and the fake mode to write graphs in.

    Random operators call torch's own, in order, so that their numbers are eager's. Whether a loop
    is written with vectors must not hang on what it was fused with, for that decides in which
    order it sums: a plan that saves other values would round otherwise. The tracing context is
    there because Inductor's cache asks it for the mode's shapes.
    """
    import torch._guards
    import torch._inductor.config
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    context = torch._guards.TracingContext(mode)
    settings = {"fallback_random": True, "cpp.enable_tiling_heuristics": False}
    with torch._inductor.config.patch(settings), torch._guards.tracing(context):
        yield mode


def taken_apart(
    function: Callable[..., Any],
    fakes: Sequence[torch.Tensor],
    table: Mapping[Any, Callable[..., Any]],
) -> torch.fx.Graph:
    """What a function of fake tensors calls, none of it in place, by what the table makes of it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = torch.func.functionalize(function)
    with torch.no_grad(), below_autograd():
        return make_fx(functional, decomposition_table=dict(table))(*fakes).graph


def _inductor_cache_folder() -> Path:
    """The folder whose files Inductor unpickles and whose libraries it loads."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def inductor_compiled(
    graph: torch.fx.GraphModule, fakes: Sequence[torch.Tensor], *, mode: Any, is_backward: bool
) -> Any:
    """Compile as torch.compile does from the joint graph on; the result takes a list it empties."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    make_private(_inductor_cache_folder())
    with V.set_fake_mode(mode):
        graph = joint_graph_passes(graph)
    return compile_fx_inner(graph, list(fakes), is_backward=is_backward)


def compiled(
    function: Callable[..., Any], examples: Sequence[torch.Tensor]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Inductor's code for a function of tensors, which gives a tuple of them: for all sizes along
    dims of which ``examples`` have more than one.

    As torch.compile, but without Dynamo: that asks at every call whether anything has changed,
    gives up after eight answers, and skips for good what it meets while a TorchDispatchMode looks
    on.
    """
    import torch._guards
    import torch._inductor.config
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), below_autograd():
        table = inductor_decompositions()
        graph = make_fx(function, table, tracing_mode="symbolic")(*examples)
        fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        mode = fakes[0].fake_mode
        # What the trace leaves there cannot be pickled, and Inductor's cache passes by what cannot,
        # in every process anew; where nothing is left it asks the inputs.
        graph.shape_env = None
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            run = inductor_compiled(graph, fakes, mode=mode, is_backward=False)
    return lambda *tensors: tuple(run(list(tensors)))


def inductor_lowered(
    graph: torch.fx.GraphModule, fakes: Sequence[torch.Tensor], *, mode: Any, is_backward: bool
) -> tuple[Any, str, Any]:
    """As ``inductor_compiled``, but the C++ is only written: result, source, GraphLowering.

    Upstream's ``torch._inductor.utils.get_code`` swaps the same method to the same end.
    """
    import torch._inductor.config
    from torch._inductor.graph import GraphLowering

    written: list[tuple[str, Any]] = []

    class Unloaded:
        __file__ = ""

        def call(self, _: Any) -> None:
            raise AssertionError("written only")

    def write(lowering: GraphLowering) -> Any:
        written.append((lowering.codegen()[0].value, lowering))
        return Unloaded()

    method = "compile_to_module"
    original = getattr(GraphLowering, method)
    setattr(GraphLowering, method, write)
    try:
        with torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False):
            result = inductor_compiled(graph, fakes, mode=mode, is_backward=is_backward)
    finally:
        setattr(GraphLowering, method, original)
    ((source, lowering),) = written
    return result, source, lowering


def compiled_kernels(
    sources: Mapping[str, tuple[Sequence[str], str]],
) -> dict[str, Callable[..., None]]:
    """Kernels as Inductor writes them down, the types of their arguments and C++; those of a step
    that has run are on disk, and one that runs later finds these there."""
    from torch._inductor.async_compile import AsyncCompile

    make_private(_inductor_cache_folder())
    pool = AsyncCompile()
    scope = {name: pool.cpp_pybinding(list(kinds), text) for name, (kinds, text) in sources.items()}
    pool.wait(scope)
    return scope


def keep_busy(cycles: int) -> None:
    """The current CUDA device does nothing else for so long, and the host goes on."""
    torch.cuda._sleep(cycles)


def when_cuda_begins(call: Callable[[], object]) -> None:
    """At once, where it has; CUDA that nobody uses takes a GPU's memory and seconds."""
    torch.cuda._lazy_call(call)


def symmetric_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Of a GPU, that other processes of this host can be given to write to."""
    symmetric = torch.distributed._symmetric_memory
    made: torch.Tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    return made


def symmetric_views(
    memory: torch.Tensor, group: torch.distributed.ProcessGroup
) -> list[torch.Tensor]:
    """What each rank of the group has made so, of one size, as this one sees it for as long as it
    keeps its own; all of them come together for it."""
    met = torch.distributed._symmetric_memory.rendezvous(memory, group.group_name)
    return [met.get_buffer(rank, memory.shape, memory.dtype) for rank in range(group.size())]


def exchanges_issued() -> list[dict[str, Any]]:
    """What the flight recorder kept of this process's exchanges, oldest first; gloo's too."""
    dump = attrgetter("_dump_fr_trace_json")(torch._C._distributed_c10d)
    entries: list[dict[str, Any]] = json.loads(dump()).get("entries", [])
    return entries


def supervised_agent(
    spec: Any,
    logs: Any,
    *,
    have_ended: Callable[[Mapping[int, int]], bool],
    shutdown_seconds: int,
) -> Any:
    """torchrun's agent for this host, which asks before it looks at its workers itself.

    ``have_ended`` is given the process of each rank. Left to itself the agent reaps whoever ended
    first, then waits up to 30 seconds, a figure that cannot be set, for ranks that wait in an
    exchange and heed no SIGTERM, or that are stopped.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Supervised(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            if not have_ended({w.global_rank: w.id for w in worker_group.workers}):
                return RunResult(state=WorkerState.HEALTHY)
            result: RunResult = super()._monitor_workers(worker_group)
            return result

    return Supervised(spec, logs, shutdown_timeout=shutdown_seconds)


def profiler_is_on(*, is_quick: bool = False) -> bool:
    """Another profiler records, or is prepared to record, in this process.

    torch 2.13 has one session for a process. A second profiler takes the events of a first that
    records; where the first is only prepared (the warm-up of a schedule), the process crashes.
    That one is prepared stands in the Python object alone, so that is looked for, in a walk over
    all objects of some 50 ms. An ``is_quick`` look leaves it out where no schedule has begun, or
    another one has ended since.
    """
    if torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:
        return True
    has_begun = "ProfilerStep" in torch.autograd.profiler.KinetoStepTracker._step_dict
    if is_quick and not has_begun:
        return False
    sessions = _instances(torch.autograd.profiler.profile)
    if any(getattr(s, "entered", False) and s.kineto_results is None for s in sessions):
        return True
    # With acc_events=True one session is prepared again, and still has its earlier results.
    if not has_begun:
        return False
    warming = torch.profiler.ProfilerAction.WARMUP
    schedules = _instances(torch.profiler.profile)
    return any(s.acc_events and s.current_action is warming for s in schedules)


def _instances(kind: type) -> list[Any]:
    """Those that live, of ``kind`` and of what is derived from it."""
    kinds: list[type] = [kind]
    for each in kinds:
        derived: list[type] = type.__subclasses__(each)
        kinds += [k for k in derived if k not in kinds]
    return [x for x in gc.get_referrers(*kinds) if issubclass(type(x), kind)]


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A number for each tensor, which every operator that writes into it raises."""
    return [0 if t.is_inference() else t._version for t in tensors]
