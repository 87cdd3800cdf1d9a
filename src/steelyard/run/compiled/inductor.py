"""The Inductor runner: compiles a program segment by segment, between its collectives.

It fuses what generated Python calls one by one. It needs a C++ compiler, and time to run it. Its
memory use differs from that of the program: lower.py predicts it. Not for cutting the program: see
segments.py.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from steelyard import _torch
from steelyard.comm.channel import Channel
from steelyard.errors import BadInput, RunFailed
from steelyard.ir.graph import Phase
from steelyard.ir.program import Instruction, Program
from steelyard.run.codegen import Emitted, Fused, Run, emit
from steelyard.run.compiled.segments import Segment, Writer, segments
from steelyard.run.finite_check import FiniteWatch

_NO_CHANNELS: Mapping[str, Channel] = MappingProxyType({})


def compile_program(
    program: Program,
    *,
    channels: Mapping[str, Channel] = _NO_CHANNELS,
    watch: FiniteWatch | None = None,
) -> Emitted:
    """Compile a program through Inductor, with the interface of ``emit``.

    This takes seconds the first time, and less if Inductor's caches contain the code. In all cases
    that were tried, results were bitwise equal to those of the same graph compiled without trades.
    They equal those of generated Python except for rounding, because fused loops sum in another
    order.
    """
    check_compiler()
    with compiler_failures(), _torch.inductor_settings() as mode:
        return emit(program, channels=channels, fusing=partial(_fused, mode=mode), watch=watch)


def _fused(program: Program, *, mode: Any) -> Iterator[Fused | Instruction]:
    parts = segments(program)
    written = FxSegments(program, mode)
    for at, part in enumerate(parts):
        if isinstance(part, Instruction):
            yield part
            continue
        one = written.write(part)
        compiled = _torch.inductor_compiled(
            one.module, one.fakes, mode=mode, is_backward=part.phase is Phase.BACKWARD
        )
        written.set_output_strides(one, compiled)
        yield Fused(
            takes=part.takes,
            gives=part.gives,
            run=_checked(compiled, _unaliased_outputs(program, parts, at)),
            source=compiled.source_code,
        )


def check_compiler() -> None:
    """Raise BadInput, before anything is compiled, if there is no C++ compiler, which Inductor
    needs on the CPU.
    """
    if _torch.cpp_compiler() is None:
        raise BadInput(
            "the Inductor runner found no C++ compiler",
            expected="g++ or clang++ on the PATH, or named in $CXX",
            remedy="install one (Debian and Ubuntu: apt install g++), or use runner='python', "
            "which needs none",
        )


@contextlib.contextmanager
def compiler_failures() -> Iterator[None]:
    """Translate the errors of an incomplete C++ compiler to BadInput."""
    try:
        yield
    except _torch.cpp_errors() as error:
        lines = [line.strip() for line in str(error).splitlines() if "error:" in line]
        raise BadInput(
            f"the C++ compiler {_torch.cpp_compiler()} failed: {(lines or ['?'])[0]}"[:300],
            expected="a C++17 compiler with OpenMP and Python's headers",
            remedy="install a complete one, or use runner='python', which needs none",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One segment as an fx graph, and the fake tensors of its inputs."""

    segment: Segment
    module: torch.fx.GraphModule
    fakes: tuple[torch.Tensor, ...]
    writer: Writer


class FxSegments:
    """Segments as fx graphs; each one is written after the output layouts of the earlier ones are
    known.
    """

    def __init__(self, program: Program, mode: Any) -> None:
        self._program, self._mode = program, mode
        self._node_of = {i.value: i.node for i in program.instructions if i.sink is None}
        self._fakes = {
            node.name: self._planned(node.name) for node in program.graph.inputs() if node.outputs
        }

    def write(self, segment: Segment) -> Written:
        for name in segment.takes:
            if name not in self._fakes:  # the output of an uncompiled line
                self._fakes[name] = self._planned(name)
        writer = Writer(self._program.graph, self._mode)
        return Written(
            segment=segment,
            module=writer.write(segment, self._fakes),
            fakes=tuple(self._fakes[name] for name in segment.takes),
            writer=writer,
        )

    def set_output_strides(self, written: Written, compiled: Any) -> None:
        """Record the strides with which ``compiled`` returns the outputs of the segment."""
        for name, strides in zip(written.segment.gives, compiled.output_strides, strict=True):
            fake = written.writer.output_fake(name)
            if strides is not None and tuple(map(int, strides)) != tuple(fake.stride()):
                with self._mode:
                    fake = torch.empty_strided(
                        fake.shape, tuple(map(int, strides)), dtype=fake.dtype, device=fake.device
                    )
            self._fakes[name] = fake

    def _planned(self, value: str) -> torch.Tensor:
        node = self._program.graph.by_name[self._node_of.get(value, value)]
        (tensor,) = node.outputs
        with self._mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride, dtype=getattr(torch, tensor.dtype)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoAlias:
    """An output that must not share memory with others, because output ``place`` is later summed in
    place.

    Neither the other ``outputs`` nor the ``inputs`` that are read later may share its storage,
    except those that share it in the graph.
    """

    place: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def _unaliased_outputs(
    program: Program, parts: Sequence[Segment | Instruction], at: int
) -> list[_NoAlias]:
    part, later = parts[at], parts[at + 1 :]
    assert isinstance(part, Segment)
    graph = program.graph
    node_of = {i.value: i.node for i in program.instructions if i.sink is None}

    def storages_of(value: str) -> tuple[int, ...]:
        return graph.storages_of(node_of.get(value, value))

    written = {
        value
        for each in later
        if isinstance(each, Instruction) and each.sink is None
        for name, value in zip(graph.by_name[each.node].inputs, each.inputs, strict=True)
        if name in graph.by_name[each.node].mutates
    }
    read = {n for x in later for n in (x.takes if isinstance(x, Segment) else x.inputs)}
    read.update(node.name for node in graph.inputs())
    return [
        _NoAlias(
            place=place,
            inputs=tuple(
                n
                for n, t in enumerate(part.takes)
                if t in read and storages_of(t) != storages_of(value)
            ),
            outputs=tuple(
                n for n, g in enumerate(part.gives) if storages_of(g) != storages_of(value)
            ),
        )
        for place, value in enumerate(part.gives)
        if value in written
    ]


def _checked(compiled: Any, unaliased: Sequence[_NoAlias]) -> Run:
    """Check the aliasing of the outputs in the first call only, because it is the same in all
    steps.
    """
    is_checked = not unaliased

    def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        nonlocal is_checked
        # Only inputs that are also alive elsewhere are kept; others would not be freed during the
        # call.
        live_inputs = [] if is_checked else [[inputs[n] for n in one.inputs] for one in unaliased]
        results: Sequence[torch.Tensor] = compiled(inputs)
        if not is_checked:
            for one, live in zip(unaliased, live_inputs, strict=True):
                others = (*live, *(results[n] for n in one.outputs))
                if _torch.storage_key(results[one.place]) in map(_torch.storage_key, others):
                    raise RunFailed(
                        "Inductor placed a gradient that ranks sum in the memory of another value",
                        expected="gradients in separate memory",
                        remedy="report this model, and use runner='python' meanwhile",
                    )
            is_checked = True
        return results

    return run
