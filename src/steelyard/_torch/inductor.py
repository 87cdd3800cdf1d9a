"""Inductor internals: graphs compiled, or only lowered to C++.

Not for splitting a program into graphs: see run/compiled.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from steelyard._torch.autograd import below_autograd
from steelyard._torch.fake import FakeTensorMode
from steelyard._torch.private_names import require
from steelyard.private_files import make_private
from steelyard.torch_version import minor_version


# Inductor takes seconds to import, and is a private module: it is imported only in the functions
# that need it.
def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions, except those with their own random number generation."""
    require("inductor")
    import torch._inductor.config
    import torch._inductor.decomposition
    import torch._inductor.lowering  # Pooling's decomposition reads this without importing it.

    with torch._inductor.config.patch(fallback_random=True):
        found: dict[Any, Callable[..., Any]] = torch._inductor.decomposition.select_decomp_table()
    return {operator: rule for operator, rule in found.items() if operator not in _kept_whole()}


@cache
def _kept_whole() -> frozenset[Any]:
    """Keep operators whole that torch 2.12 no longer decomposes, and return them.

    torch 2.11 always decomposes them. For channels-last tensors the results then differ from those
    of eager PyTorch.
    """
    if minor_version(torch.__version__) >= (2, 12):
        return frozenset()
    from torch._inductor.lowering import make_fallback

    aten = torch.ops.aten
    packets = (aten.rand_like, aten.randn_like, aten.randint_like)
    for packet in packets:
        make_fallback(packet, warn=False, override_decomp=True)
    return frozenset(getattr(p, overload) for p in packets for overload in p.overloads())


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor would use on the CPU; None if there is none."""
    import torch._inductor.cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return str(torch._inductor.cpp_builder.get_cpp_compiler())
    except InvalidCxxCompiler:
        return None


def cpp_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions that Inductor raises if the C++ compiler fails."""
    import torch._inductor.exc

    return (torch._inductor.exc.CppCompileError,)


@contextlib.contextmanager
def inductor_settings() -> Iterator[Any]:
    """Patch Inductor's settings for the runner, and yield the fake mode to write graphs in.

    Random operators call torch's own kernels, in order, so that their numbers equal eager's. The
    vectorization of a loop must not depend on the fused operators, since it determines the
    summation order: otherwise a plan with other saved activations would round differently.
    Inductor's cache needs the tracing context, from which it gets the symbolic shapes.
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
    """Trace a function of fake tensors, functionalized and decomposed by the table."""
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = torch.func.functionalize(function)
    with torch.no_grad(), below_autograd():
        return make_fx(functional, decomposition_table=dict(table))(*fakes).graph


def _inductor_cache_folder() -> Path:
    """Return the folder from which Inductor unpickles files and loads libraries."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def inductor_compiled(
    graph: torch.fx.GraphModule, fakes: Sequence[torch.Tensor], *, mode: Any, is_backward: bool
) -> Any:
    """Compile a joint graph as torch.compile does; the result takes a list and empties it."""
    require("inductor")
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    _kept_whole()
    make_private(_inductor_cache_folder())
    with V.set_fake_mode(mode):
        graph = joint_graph_passes(graph)
    return compile_fx_inner(graph, list(fakes), is_backward=is_backward)


def compiled(
    function: Callable[..., Any], examples: Sequence[torch.Tensor]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return Inductor's code for a function from tensors to a tuple of tensors.

    The code works for any size of those dims whose size in ``examples`` is above one.

    Unlike torch.compile it does not use Dynamo, which checks guards at every call, gives up after
    eight recompilations, and permanently skips code that it first meets under a
    TorchDispatchMode.
    """
    import torch._guards
    import torch._inductor.config
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), below_autograd():
        table = inductor_decompositions()
        graph = make_fx(function, table, tracing_mode="symbolic")(*examples)
        fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        mode = fakes[0].fake_mode
        # The trace leaves an unpicklable shape env here. With it, Inductor's cache finds nothing in
        # a new process; without it, the cache uses the inputs.
        graph.shape_env = None
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            run = inductor_compiled(graph, fakes, mode=mode, is_backward=False)
    return lambda *tensors: tuple(run(list(tensors)))


def inductor_lowered(
    graph: torch.fx.GraphModule, fakes: Sequence[torch.Tensor], *, mode: Any, is_backward: bool
) -> tuple[Any, str, Any]:
    """Lower as ``inductor_compiled`` does, but only write the C++: result, source, GraphLowering.

    Upstream's ``torch._inductor.utils.get_code`` replaces the same method for the same purpose.
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
    """Compile C++ kernels from their argument types and sources, as Inductor does.

    The kernels of a step that has run are on disk, where later runs find them.
    """
    from torch._inductor.async_compile import AsyncCompile

    make_private(_inductor_cache_folder())
    pool = AsyncCompile()
    scope = {name: pool.cpp_pybinding(list(kinds), text) for name, (kinds, text) in sources.items()}
    pool.wait(scope)
    return scope
