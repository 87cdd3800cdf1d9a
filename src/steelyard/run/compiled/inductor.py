"""The second runner: a program compiled with Inductor, piece by piece between what is exchanged.

Fuses what generated Python calls one by one, and needs a C++ compiler and its time. Its memory
differs from the program's own: what it will hold is in lower.py. Not for where the program is
cut, nor why: see segments.py.
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

_ALONE: Mapping[str, Channel] = MappingProxyType({})


def compile_program(
    program: Program,
    *,
    channels: Mapping[str, Channel] = _ALONE,
    watch: FiniteWatch | None = None,
) -> Emitted:
    """As ``emit``, through Inductor; seconds the first time, less where its caches know the code.

    Bitwise equal to the same graph compiled without trades wherever that was tried; to generated
    Python within rounding, since fused loops sum in another order.
    """
    check_compiler()
    with reading_failures(), _torch.inductor_settings() as mode:
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
        written.know(one, compiled)
        yield Fused(
            takes=part.takes,
            gives=part.gives,
            run=_checked(compiled, _apart(program, parts, at)),
            source=compiled.source_code,
        )


def check_compiler() -> None:
    """Inductor writes C++ on the CPU; said before anything is compiled."""
    if _torch.cpp_compiler() is None:
        raise BadInput(
            "the Inductor runner found no C++ compiler",
            expected="g++ or clang++ on the PATH, or named in $CXX",
            remedy="install one (Debian and Ubuntu: apt install g++), or take runner='python', "
            "which needs none",
        )


@contextlib.contextmanager
def reading_failures() -> Iterator[None]:
    """Of a compiler that is there, and not whole."""
    try:
        yield
    except _torch.cpp_errors() as error:
        lines = [line.strip() for line in str(error).splitlines() if "error:" in line]
        raise BadInput(
            f"the C++ compiler {_torch.cpp_compiler()} failed: {(lines or ['?'])[0]}"[:300],
            expected="a C++17 compiler with OpenMP and Python's headers",
            remedy="install a complete one, or take runner='python', which needs none",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One segment as an fx graph, and the fake tensors that it takes."""

    segment: Segment
    module: torch.fx.GraphModule
    fakes: tuple[torch.Tensor, ...]
    writer: Writer


class FxSegments:
    """Segments as fx graphs, each once it is known how those before it lay out what they give."""

    def __init__(self, program: Program, mode: Any) -> None:
        self._program, self._mode = program, mode
        self._node_of = {i.value: i.node for i in program.instructions if i.sink is None}
        self._fakes = {
            node.name: self._planned(node.name) for node in program.graph.inputs() if node.outputs
        }

    def write(self, segment: Segment) -> Written:
        for name in segment.takes:
            if name not in self._fakes:  # made by a line that is carried out as it stands
                self._fakes[name] = self._planned(name)
        writer = Writer(self._program.graph, self._mode)
        return Written(
            segment=segment,
            module=writer.write(segment, self._fakes),
            fakes=tuple(self._fakes[name] for name in segment.takes),
            writer=writer,
        )

    def know(self, written: Written, compiled: Any) -> None:
        """``compiled`` says with which strides the segment returns what others take."""
        for name, strides in zip(written.segment.gives, compiled.output_strides, strict=True):
            fake = written.writer.given(name)
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
class _Apart:
    """What lies on memory of its own where a segment gives it: ``place`` of what it gives is summed
    where it lies, and neither others that it gives nor such of what it takes as are read later, or
    stay, may lie there. What the graph has on one storage may."""

    place: int
    taken: tuple[int, ...]
    given: tuple[int, ...]


def _apart(program: Program, parts: Sequence[Segment | Instruction], at: int) -> list[_Apart]:
    part, later = parts[at], parts[at + 1 :]
    assert isinstance(part, Segment)
    graph = program.graph
    node_of = {i.value: i.node for i in program.instructions if i.sink is None}

    def lying(value: str) -> tuple[int, ...]:
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
        _Apart(
            place=place,
            taken=tuple(
                n for n, t in enumerate(part.takes) if t in read and lying(t) != lying(value)
            ),
            given=tuple(n for n, g in enumerate(part.gives) if lying(g) != lying(value)),
        )
        for place, value in enumerate(part.gives)
        if value in written
    ]


def _checked(compiled: Any, apart: Sequence[_Apart]) -> Run:
    """How results lie does not change from one step to the next, so it is looked at once."""
    has_been_seen = not apart

    def run(taken: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        nonlocal has_been_seen
        # Only of what others hold too: what ends here would else not be freed.
        staying = [] if has_been_seen else [[taken[n] for n in one.taken] for one in apart]
        results: Sequence[torch.Tensor] = compiled(taken)
        if not has_been_seen:
            for one, stays in zip(apart, staying, strict=True):
                others = (*stays, *(results[n] for n in one.given))
                if _torch.storage_key(results[one.place]) in map(_torch.storage_key, others):
                    raise RunFailed(
                        "Inductor laid what is summed over ranks on memory of another value",
                        expected="gradients on memory of their own",
                        remedy="report this model, and take runner='python' meanwhile",
                    )
            has_been_seen = True
        return results

    return run
