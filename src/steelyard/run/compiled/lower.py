"""Lowers a program to the program that Inductor makes of it, so that the predictor can price it.

Inductor generates straight-line code of allocations, kernels and library calls. Here that code runs
on fake tensors, with stubs for kernels: nothing is computed and no C++ is compiled. Upstream's own
estimate (torch._inductor.memory) covers a single segment, before buffers are reused, and ignores
the allocations of library calls. Not for running the program (see inductor.py) or for the recorded
data (see recorder.py).
"""

import ast
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from steelyard import _torch
from steelyard.ir.graph import Phase
from steelyard.ir.program import Program
from steelyard.run.compiled.inductor import FxSegments, Written, check_compiler, compiler_failures
from steelyard.run.compiled.recorder import GeneratedKernel, ProgramRecorder
from steelyard.run.compiled.segments import Segment, segments


def lower(program: Program, kernels: dict[str, GeneratedKernel] | None = None) -> Program:
    """Return the lines that ``compile_program(program)`` would run, with their storages;
    Inductor's kernels are added to ``kernels``."""
    check_compiler()
    kernels = {} if kernels is None else kernels
    with _torch.inductor_settings() as mode:
        lowered = _lower(program, kernels, mode)
        before = None if program.earlier is program else _lower(program.earlier, kernels, mode)
    sibling_programs = tuple(lower(other, kernels) for other in program.sibling_programs)
    return replace(lowered, before=before, sibling_programs=sibling_programs)


def compiled(kernels: Mapping[str, GeneratedKernel]) -> dict[str, Callable[..., Any]]:
    """Compile the kernels; return each as a callable."""
    with compiler_failures(), _torch.inductor_settings():
        made = _torch.compiled_kernels({n: (k.kinds, k.text) for n, k in kernels.items()})
    return {name: kernel.bind(made[name]) for name, kernel in kernels.items()}


def _lower(program: Program, kernels: dict[str, GeneratedKernel], mode: Any) -> Program:
    written = FxSegments(program, mode)
    with mode:
        recorder = ProgramRecorder(program)
        known = {node.name: recorder.input(node.name) for node in program.graph.inputs()}
    places: Counter[Phase] = Counter()
    for part in segments(program):
        if isinstance(part, Segment):
            one = written.write(part)
            places[part.phase] += 1
            source = _lower_segment(one, mode, place=places[part.phase])
            outputs = _run_wrapper(source, [known[name] for name in part.takes], recorder, mode)
            known.update(zip(part.gives, outputs, strict=True))
            written.set_output_strides(one, source.compiled)
        elif part.sink is not None:
            recorder.add_output(known[part.inputs[0]], part)
        else:
            with mode:
                known[part.value] = recorder.add_line(part, [known[name] for name in part.inputs])
    kernels.update(recorder.kernels)
    return recorder.program(loss=known[program.loss])


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrapperSource:
    """The wrapper code that Inductor generated for one segment. ``origins`` maps a buffer to the
    values that it contains, and ``name`` is the prefix of its buffers.
    """

    name: str
    compiled: Any
    text: str
    constants: Mapping[str, torch.Tensor]
    origins: Mapping[str, tuple[str, ...]]
    phase: Phase


def _lower_segment(written: Written, mode: Any, *, place: int) -> _WrapperSource:
    phase = written.segment.phase
    values = written.writer.value_names()
    compiled, text, lowering = _torch.inductor_lowered(
        written.module, written.fakes, mode=mode, is_backward=phase is Phase.BACKWARD
    )
    return _WrapperSource(
        name=f"{phase}" if place == 1 else f"{phase}.{place}",
        compiled=compiled,
        text=text,
        constants=dict(lowering.constants),
        origins={
            name: tuple(values[o.name] for o in buffer.get_origins() if o.name in values)
            for name, buffer in lowering.name_to_buffer.items()
        },
        phase=phase,
    )


def _run_wrapper(
    source: _WrapperSource, inputs: list[torch.Tensor], recorder: ProgramRecorder, mode: Any
) -> list[torch.Tensor]:
    """Execute the wrapper statement by statement, so that the name of each buffer is known."""
    module = ast.parse(source.text)
    wrapper = _WrapperRecorder(source, recorder)
    scope: dict[str, Any] = {}
    for statement in module.body:
        if isinstance(statement, ast.ClassDef):
            break
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Assign)):
            _execute(statement, scope)
            scope.update(wrapper.stubs())
    for name, constant in source.constants.items():
        with mode:
            scope[name] = recorder.constant(f"constant:{source.name}.{name}", constant)
    call = next(n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == "call")
    scope["args"] = inputs
    with mode, wrapper:
        for statement in call.body:
            if isinstance(statement, ast.Return):
                assert statement.value is not None
                target: list[ast.expr] = [ast.Name("results", ast.Store())]
                _execute(ast.Assign(targets=target, value=statement.value), scope)
                return list(scope["results"])
            wrapper.begin(statement)
            _execute(statement, scope)
    raise AssertionError("the wrapper returns nothing")


def _execute(statement: ast.stmt, scope: dict[str, Any]) -> None:
    module = ast.fix_missing_locations(ast.Module(body=[statement], type_ignores=[]))
    exec(compile(module, "<inductor>", "exec"), scope)


# Operators that the stubs below call; those of ``prim`` query a fake tensor's device.
_STUB_OPERATORS = (torch.ops.aten.empty_strided.default, torch.ops.aten.as_strided.default)


class _WrapperRecorder(_torch.TorchDispatchMode):
    """Records each allocation, kernel and library call of the wrapper."""

    def __init__(self, source: _WrapperSource, recorder: ProgramRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # upstream's
        self._source = source
        self._recorder = recorder
        self._target = ""
        self._unwritten: list[str] = []
        self._statement_names: set[str] = set()

    def begin(self, statement: ast.stmt) -> None:
        """Record the buffers that this statement names."""
        names = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name)]
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            self._target = statement.targets[0].id
            # If a buffer reuses the storage of another one, the next kernel is the first to write
            # it.
            self._unwritten.append(self._target)
        else:
            self._target = ""
        self._statement_names = set(names)

    def stubs(self) -> dict[str, Any]:
        return {
            "async_compile": self,
            "empty_strided_cpu": self._empty,
            "reinterpret_tensor": _reinterpreted,
            "assert_size_stride": _ignore,
            "assert_alignment": _ignore,
        }

    def cpp_pybinding(self, kinds: Sequence[str], text: str) -> Callable[..., None]:
        """Return a stub for a kernel; Inductor's wrapper calls this function to compile one."""

        def kernel(*args: Any) -> None:
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            self._recorder.add_kernel(
                tensors,
                kinds=kinds,
                text=text,
                origins=self._origins(),
                phase=self._source.phase,
            )

        return kernel

    def _origins(self) -> tuple[str, ...]:
        """Return the values in the buffers that are first written in this statement."""
        new = [
            name
            for name in self._unwritten
            if name in self._statement_names or name == self._target
        ]
        self._unwritten = [name for name in self._unwritten if name not in new]
        return tuple(dict.fromkeys(v for n in new for v in self._source.origins.get(n, ())))

    def _empty(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        fresh = torch.empty_strided(shape, stride, dtype=dtype)
        self._recorder.allocate(fresh, name=f"{self._source.name}.{self._target}")
        return fresh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _STUB_OPERATORS and func.namespace != "prim":
            self._recorder.add_call(
                func,
                args,
                kwargs or {},
                result,
                name=f"{self._source.name}.{self._target}" if self._target else "",
                origins=self._origins(),
                phase=self._source.phase,
            )
        return result


def _reinterpreted(
    tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int = 0
) -> torch.Tensor:
    return torch.as_strided(tensor, shape, stride, tensor.storage_offset() + offset)


def _ignore(*_: Any) -> None:
    """Skip the wrapper's argument checks, because the fake tensors match what Inductor was
    given.
    """
