"""All private torch names that Steelyard uses, by subsystem of torch, with the reason for each.

Only this folder may import them; each has a canary in tests/torch/test_private_names.py. It
contains names and thin wrappers and no logic, except the check that refuses an unsuitable torch.

Dynamo and Inductor are imported inside the functions that need them: Dynamo alone takes longer to
import than the rest of torch, and ranks, measuring processes and hooks do not use it.
"""

import torch

from steelyard._torch.private_names import require_imported
from steelyard.torch_version import check

# This is checked before any private name is imported, so that the error says which one is missing.
check(torch.__version__)
require_imported()

from steelyard._torch.aot import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    aot_export_joint_with_descriptors,
)
from steelyard._torch.autograd import (
    accumulators,
    any_hooks,
    below_autograd,
    hooks_of_all_modules,
    is_engine,
    versions,
)
from steelyard._torch.cuda import keep_busy, symmetric_memory, symmetric_views, when_cuda_begins
from steelyard._torch.distributed import exchanges_issued, supervised_agent
from steelyard._torch.dtensor import MetaTensor, dtensor_strategies
from steelyard._torch.dynamo import (
    Guarded,
    PhiloxStateTracker,
    capture_settings,
    captured_and_guarded,
    checkpoints,
    functional_calls,
    is_checkpointed,
    quiet_logs,
)
from steelyard._torch.fake import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    keystr,
    on_meta,
    storage_key,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from steelyard._torch.inductor import (
    compiled,
    compiled_kernels,
    cpp_compiler,
    cpp_errors,
    inductor_compiled,
    inductor_decompositions,
    inductor_lowered,
    inductor_settings,
    taken_apart,
)
from steelyard._torch.operators import (
    OpOverload,
    argument,
    builtin_of,
    draws,
    is_view,
    mutates,
    reads_data,
)
from steelyard._torch.profiler import profiler_is_on

__all__ = [
    "BufferAOTInput",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "Guarded",
    "InputMutationAOTOutput",
    "MetaTensor",
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
