"""Inductor: graphs compiled, or only lowered to C++.

Not for cutting a program into graphs: see run/compiled.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from steelyard._torch.autograd import below_autograd
from steelyard._torch.fake import FakeTensorMode
from steelyard.private_files import make_private


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
