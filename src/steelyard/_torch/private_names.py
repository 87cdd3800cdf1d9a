"""The private torch names that the files of this folder use, and the version that added each.

Tried with torch 2.11.0, 2.12.1, 2.13.0 and 2.14.1. ``require`` looks up the names of a file before
their first use. If torch lacks one, the error says which. Each file describes what its names do.
"""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from steelyard.errors import BadInput
from steelyard.safe_text import printable
from steelyard.torch_version import INSTALL, NEWEST_TESTED, OLDEST, dotted, minor_version


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateNames:
    """The names that one file uses, and the feature that does not work without them.

    ``imported`` are imported together with this folder. They and ``names`` exist in every tested
    version, ``since`` only in later ones. ``oldest`` is the first version in which the feature
    works.
    """

    feature: str
    oldest: tuple[int, int] = OLDEST
    imported: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    since: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def needed(self, version: tuple[int, int]) -> tuple[str, ...]:
        """Return the names that a version of torch should have."""
        later = (name for name, first in self.since.items() if version >= first)
        return (*self.imported, *self.names, *later)


@cache
def require(file: str) -> None:
    """Raise an error if torch lacks a private name that ``file`` of this folder uses."""
    table, version = PRIVATE_NAMES[file], minor_version(torch.__version__)
    if version < table.oldest:
        oldest = dotted(table.oldest)
        raise BadInput(
            f"{table.feature} does not work under torch {printable(torch.__version__[:40])}",
            expected=f"torch {oldest} or newer",
            remedy=f'pip install "torch>={oldest}", or do without {table.feature}',
        )
    _look_up(table.feature, table.needed(version))


def require_imported() -> None:
    """Raise an error if torch lacks a private name that is imported together with this folder."""
    for table in PRIVATE_NAMES.values():
        _look_up(table.feature, table.imported)


def _look_up(feature: str, names: Iterable[str]) -> None:
    for name in names:
        try:
            find(name)
        except (ImportError, AttributeError) as error:
            version = printable(torch.__version__[:40])
            raise BadInput(
                f"{feature} does not work under torch {version}, which has no {name}",
                expected=f"torch {dotted(OLDEST)} to {dotted(NEWEST_TESTED)}, the tested versions",
                remedy=INSTALL,
            ) from error


def find(name: str) -> Any:
    """Return the object with a dotted name, importing the modules of that name."""
    value: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if not hasattr(value, part):
            importlib.import_module(path)
        value = getattr(value, part)
    return value


_DESCRIPTORS = "torch._functorch._aot_autograd.descriptors"
_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"
_CONFIG, _CONVERT = "torch._dynamo.config", "torch._dynamo.convert_frame"
_OUTPUT = "torch._dynamo.output_graph.OutputGraph"
_PYTREE, _DISPATCH = "torch.utils._pytree", "torch.utils._python_dispatch"
_PROPAGATOR = "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator"
_INDUCTOR, _MODULE = "torch._inductor", "torch.nn.modules.module"
_OPERATOR = "torch.ops.aten.lstm.input"

PRIVATE_NAMES: Mapping[str, PrivateNames] = {
    "aot": PrivateNames(
        feature="capture",
        imported=(
            f"{_DESCRIPTORS}.BufferAOTInput",
            f"{_DESCRIPTORS}.GradAOTOutput",
            f"{_DESCRIPTORS}.InputMutationAOTOutput",
            f"{_DESCRIPTORS}.ParamAOTInput",
            f"{_DESCRIPTORS}.PlainAOTInput",
            f"{_DESCRIPTORS}.PlainAOTOutput",
            f"{_DESCRIPTORS}.TangentAOTInput",
        ),
        names=(
            "torch._functorch.aot_autograd.aot_export_joint_with_descriptors",
            "torch._functorch.aot_autograd.construct_fake_mode",
        ),
    ),
    "autograd": PrivateNames(
        feature="a step without autograd",
        imported=(
            "torch._C._AutoDispatchBelowAutograd",
            "torch.Tensor._backward_hooks",
            "torch.Tensor._post_accumulate_grad_hooks",
            "torch.Tensor._version",
            "torch.autograd.graph._engine_run_backward",
            f"{_MODULE}._global_backward_hooks",
            f"{_MODULE}._global_backward_pre_hooks",
            f"{_MODULE}._global_forward_hooks",
            f"{_MODULE}._global_forward_pre_hooks",
        ),
    ),
    "cuda": PrivateNames(
        feature="a plan for GPUs",
        imported=(
            "torch.cuda._lazy_call",
            "torch.cuda._sleep",
            "torch.distributed._symmetric_memory.empty",
            "torch.distributed._symmetric_memory.rendezvous",
        ),
    ),
    "distributed": PrivateNames(
        feature="a plan for several ranks",
        names=(
            "torch._C._distributed_c10d._dump_fr_trace_json",
            f"{_AGENT}._monitor_workers",
        ),
    ),
    "dtensor": PrivateNames(
        feature="tensor parallelism",
        # DTensor's rules that need no mesh: 4 operators in 2.11.0, 736 in 2.12.1, 1013 in 2.13.0,
        # 1220 in 2.14.1. The others are asked for a mesh, and cannot be used here.
        oldest=(2, 12),
        names=(
            f"{_PROPAGATOR}.op_single_dim_strategy_funcs",
            f"{_PROPAGATOR}.op_to_shape_and_stride_idx",
            "torch.distributed.tensor._dtensor_spec.TensorMeta",
        ),
        since={f"{_PROPAGATOR}.op_to_scalar_shape_adjuster": (2, 13)},
    ),
    "dynamo": PrivateNames(
        feature="capture",
        imported=("torch._decomp.decompositions_for_rng.PhiloxStateTracker",),
        names=(
            f"{_CONFIG}.allow_rnn",
            f"{_CONFIG}.assume_static_by_default",
            f"{_CONFIG}.automatic_dynamic_shapes",
            f"{_CONFIG}.enable_dynamo_decompositions",
            f"{_CONFIG}.ignore_logging_functions",
            f"{_CONFIG}.replay_side_effects",
            f"{_CONFIG}.side_effect_replay_policy",
            f"{_CONFIG}.skip_nnmodule_hook_guards",
            f"{_CONFIG}.specialize_float",
            f"{_CONFIG}.use_numpy_random_stream",
            f"{_CONVERT}.GraphCaptureOutput.build_guards",
            f"{_CONVERT}.fullgraph_capture",
            f"{_OPERATOR}._dispatch_cache",
            f"{_OPERATOR}.py_kernels",
            "torch._C.DispatchKey",
            "torch._C._get_mkldnn_enabled",
            "torch._C._set_mkldnn_enabled",
            "torch._dynamo.functional_export.create_fx_graph_from_captured_output",
            "torch._dynamo.hooks.Hooks",
            "torch._dynamo.symbolic_convert._import_module",
            "torch._dynamo.utils.dynamo_timed",
            "torch._dynamo.utils.get_metrics_context",
            "torch._export.utils._compiling_state_context",
            "torch.compiler._is_exporting_flag",
            "torch.nn.utils.stateless._functional_call",
        ),
        since={f"{_OUTPUT}._check_requires_grad_intermediate_outputs": (2, 12)},
    ),
    "fake": PrivateNames(
        feature="capture",
        imported=(
            "torch.UntypedStorage._cdata",
            "torch._subclasses.fake_tensor.FakeTensor",
            "torch._subclasses.fake_tensor.FakeTensorMode",
            f"{_DISPATCH}.TorchDispatchMode",
            f"{_DISPATCH}._disable_current_modes",
            f"{_PYTREE}.keystr",
            f"{_PYTREE}.tree_flatten",
            f"{_PYTREE}.tree_flatten_with_path",
            f"{_PYTREE}.tree_leaves",
            f"{_PYTREE}.tree_map",
            f"{_PYTREE}.tree_unflatten",
        ),
    ),
    "inductor": PrivateNames(
        feature="the Inductor runner",
        names=(
            "torch._guards.TracingContext",
            "torch._guards.tracing",
            f"{_INDUCTOR}.async_compile.AsyncCompile.cpp_pybinding",
            f"{_INDUCTOR}.compile_fx.compile_fx_inner",
            f"{_INDUCTOR}.config.cpp.enable_tiling_heuristics",
            f"{_INDUCTOR}.config.fallback_random",
            f"{_INDUCTOR}.config.fx_graph_cache",
            f"{_INDUCTOR}.config.fx_graph_remote_cache",
            f"{_INDUCTOR}.cpp_builder.get_cpp_compiler",
            f"{_INDUCTOR}.decomposition.select_decomp_table",
            f"{_INDUCTOR}.exc.CppCompileError",
            f"{_INDUCTOR}.exc.InvalidCxxCompiler",
            f"{_INDUCTOR}.fx_passes.joint_graph.joint_graph_passes",
            f"{_INDUCTOR}.graph.GraphLowering.compile_to_module",
            f"{_INDUCTOR}.lowering.make_fallback",
            f"{_INDUCTOR}.runtime.cache_dir_utils.cache_dir",
            f"{_INDUCTOR}.virtualized.V",
        ),
    ),
    "operators": PrivateNames(
        feature="capture",
        imported=(
            "torch._C._autograd._get_data_attr",
            "torch._ops.OpOverload",
            f"{_OPERATOR}._op",
            f"{_OPERATOR}._schema",
        ),
    ),
    "profiler": PrivateNames(
        feature="measurement",
        imported=(
            "torch._C._autograd._profiler_enabled",
            "torch.autograd.profiler.KinetoStepTracker._step_dict",
            "torch.autograd.profiler._is_profiler_enabled",
        ),
    ),
}
