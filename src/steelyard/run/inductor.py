"""The second runner: a program compiled with Inductor, forward and backward apart.

Fuses what generated Python calls one by one, and needs a C++ compiler and its time. Its memory
differs from the program's own: what it will hold is in lowered.py. Not for where the program is
cut, nor why: see segments.py.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steelyard import _torch
from steelyard.core.errors import BadInput
from steelyard.core.program import Program
from steelyard.run.emit import Emitted
from steelyard.run.segments import Segment, Segments, Writer, segments


def compile_program(program: Program) -> Emitted:
    """As ``emit``, through Inductor; seconds the first time, less where its caches know the code.

    Bitwise equal to the same graph compiled without trades wherever that was tried; to generated
    Python within rounding, since fused loops sum in another order.
    """
    check_compiler()
    parts = segments(program)
    with _reading_failures(), _torch.inductor_settings() as mode:
        written = FxSegments(program, parts, mode)
        forward = _compiled(written.forward, mode, is_backward=False)
        backward = _compiled(written.backward_after(forward), mode, is_backward=True)
    inputs = tuple(node.name for node in program.graph.inputs())
    return Emitted(
        source="\n".join((forward.source_code, backward.source_code)),
        inputs=inputs,
        run=_runner(inputs, parts, forward, backward),
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
def _reading_failures() -> Iterator[None]:
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
    """Both segments as fx graphs; the backward one once it is known how the forward lays out."""

    def __init__(self, program: Program, parts: Segments, mode: Any) -> None:
        self._program, self._parts, self._mode = program, parts, mode
        self._fakes = _fake_inputs(program, mode)
        self.forward = self._write(parts.forward)

    def backward_after(self, compiled: Any) -> Written:
        """``compiled`` says with which strides the forward segment returns what is saved."""
        for name, strides in zip(self._parts.forward.gives, compiled.output_strides, strict=True):
            fake = self.forward.writer.fake(name)
            if strides is not None and tuple(map(int, strides)) != tuple(fake.stride()):
                with self._mode:
                    fake = torch.empty_strided(
                        fake.shape, tuple(map(int, strides)), dtype=fake.dtype, device=fake.device
                    )
            self._fakes[name] = fake
        return self._write(self._parts.backward)

    def _write(self, segment: Segment) -> Written:
        writer = Writer(self._program.graph, self._mode)
        return Written(
            segment=segment,
            module=writer.write(segment, self._fakes),
            fakes=tuple(self._fakes[name] for name in segment.takes),
            writer=writer,
        )


def _fake_inputs(program: Program, mode: Any) -> dict[str, torch.Tensor]:
    with mode:
        return {
            node.name: torch.empty_strided(
                tensor.shape, tensor.stride, dtype=getattr(torch, tensor.dtype)
            )
            for node in program.graph.inputs()
            for tensor in node.outputs[:1]
        }


def _compiled(written: Written, mode: Any, *, is_backward: bool) -> Any:
    return _torch.inductor_compiled(
        written.module, written.fakes, mode=mode, is_backward=is_backward
    )


def _runner(inputs: Sequence[str], parts: Segments, forward: Any, backward: Any) -> Any:
    """Calls the segments with lists that they empty, so that they free what they read last."""
    slots = {name: slot for slot, name in enumerate(inputs)}
    takes = [slots[name] for name in parts.forward.takes]
    given = {name: place for place, name in enumerate(parts.forward.gives)}
    # From the program's inputs, or (below zero) from what the forward segment gave.
    saved = [slots[n] if n in slots else ~given[n] for n in parts.backward.takes]
    early, late = tuple(enumerate(parts.early)), parts.late

    def run(
        inputs: Sequence[torch.Tensor], sinks: Sequence[Callable[[torch.Tensor], None]]
    ) -> torch.Tensor:
        results = list(forward([inputs[slot] for slot in takes]))
        loss: torch.Tensor = results[0]
        for place, sink in early:
            sinks[sink](results[1 + place])
        taken = [inputs[slot] if slot >= 0 else results[~slot] for slot in saved]
        results.clear()
        gradients = backward(taken)
        for gradient, sink in zip(gradients, late, strict=True):
            sinks[sink](gradient)
        return loss

    return run
