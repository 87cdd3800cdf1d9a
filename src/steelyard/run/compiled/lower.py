"""What a program becomes under Inductor, as a program again, so that THE predictor can price it.

Inductor writes a straight line of allocations, kernels and library calls. Here it is walked with
fake tensors and stubs for kernels: nothing is computed and no C++ is compiled. Upstream's own
estimate (torch._inductor.memory) sees one segment, before buffers are reused, and not what library
calls allocate themselves. Not for running it: inductor.py; not for the plain data: recorder.py.
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
from steelyard.run.compiled.inductor import FxSegments, Written, check_compiler, reading_failures
from steelyard.run.compiled.recorder import GeneratedKernel, ProgramRecorder
from steelyard.run.compiled.segments import Segment, segments


def lower(program: Program, kernels: dict[str, GeneratedKernel] | None = None) -> Program:
    """The lines that ``compile_program(program)`` would run, on storages of their own; ``kernels``
    is told of those that Inductor wrote."""
    check_compiler()
    kernels = {} if kernels is None else kernels
    with _torch.inductor_settings() as mode:
        lowered = _lower(program, kernels, mode)
        before = None if program.earlier is program else _lower(program.earlier, kernels, mode)
    sibling_programs = tuple(lower(other, kernels) for other in program.sibling_programs)
    return replace(lowered, before=before, sibling_programs=sibling_programs)


def compiled(kernels: Mapping[str, GeneratedKernel]) -> dict[str, Callable[..., Any]]:
    """Each as something to call."""
    with reading_failures(), _torch.inductor_settings():
        made = _torch.compiled_kernels({n: (k.kinds, k.text) for n, k in kernels.items()})
    return {name: kernel.on(made[name]) for name, kernel in kernels.items()}


def _lower(program: Program, kernels: dict[str, GeneratedKernel], mode: Any) -> Program:
    written = FxSegments(program, mode)
    with mode:
        scribe = ProgramRecorder(program)
        known = {node.name: scribe.input(node.name) for node in program.graph.inputs()}
    places: Counter[Phase] = Counter()
    for part in segments(program):
        if isinstance(part, Segment):
            one = written.write(part)
            places[part.phase] += 1
            source = _lowered(one, mode, place=places[part.phase])
            given = _walk(source, [known[name] for name in part.takes], scribe, mode)
            known.update(zip(part.gives, given, strict=True))
            written.know(one, source.compiled)
        elif part.sink is not None:
            scribe.serve(known[part.inputs[0]], part)
        else:
            with mode:
                known[part.value] = scribe.line(part, [known[name] for name in part.inputs])
    kernels.update(scribe.kernels)
    return scribe.program(loss=known[program.loss])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """One segment as Inductor wrote it; ``origins`` says of a buffer which values it computes.
    ``name`` sets its buffers apart from those of others."""

    name: str
    compiled: Any
    text: str
    constants: Mapping[str, torch.Tensor]
    origins: Mapping[str, tuple[str, ...]]
    phase: Phase


def _lowered(written: Written, mode: Any, *, place: int) -> _Source:
    phase = written.segment.phase
    values = written.writer.value_names()
    compiled, text, lowering = _torch.inductor_lowered(
        written.module, written.fakes, mode=mode, is_backward=phase is Phase.BACKWARD
    )
    return _Source(
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


def _walk(
    source: _Source, taken: list[torch.Tensor], scribe: ProgramRecorder, mode: Any
) -> list[torch.Tensor]:
    """Execute the wrapper statement by statement, so that each buffer is known by its name."""
    module = ast.parse(source.text)
    recorder = _WrapperRecorder(source, scribe)
    scope: dict[str, Any] = {}
    for statement in module.body:
        if isinstance(statement, ast.ClassDef):
            break
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Assign)):
            _execute(statement, scope)
            scope.update(recorder.stubs())
    for name, constant in source.constants.items():
        with mode:
            scope[name] = scribe.constant(f"constant:{source.name}.{name}", constant)
    call = next(n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == "call")
    scope["args"] = taken
    with mode, recorder:
        for statement in call.body:
            if isinstance(statement, ast.Return):
                assert statement.value is not None
                target: list[ast.expr] = [ast.Name("results", ast.Store())]
                _execute(ast.Assign(targets=target, value=statement.value), scope)
                return list(scope["results"])
            recorder.begin(statement)
            _execute(statement, scope)
    raise AssertionError("the wrapper returns nothing")


def _execute(statement: ast.stmt, scope: dict[str, Any]) -> None:
    module = ast.fix_missing_locations(ast.Module(body=[statement], type_ignores=[]))
    exec(compile(module, "<inductor>", "exec"), scope)


# What the stubs below call themselves; of ``prim`` are questions after a fake tensor's device.
_OF_STUBS = (torch.ops.aten.empty_strided.default, torch.ops.aten.as_strided.default)


class _WrapperRecorder(_torch.TorchDispatchMode):
    """Tells the scribe of each allocation, kernel and library call of the wrapper."""

    def __init__(self, source: _Source, scribe: ProgramRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # upstream's
        self._source = source
        self._scribe = scribe
        self._target = ""
        self._touched: list[str] = []
        self._named: set[str] = set()

    def begin(self, statement: ast.stmt) -> None:
        """Take note of the buffers that this statement names."""
        names = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name)]
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            self._target = statement.targets[0].id
            # A buffer that takes over another's storage is first written by the next kernel.
            self._touched.append(self._target)
        else:
            self._target = ""
        self._named = set(names)

    def stubs(self) -> dict[str, Any]:
        return {
            "async_compile": self,
            "empty_strided_cpu": self._empty,
            "reinterpret_tensor": _reinterpreted,
            "assert_size_stride": _nothing,
            "assert_alignment": _nothing,
        }

    def cpp_pybinding(self, kinds: Sequence[str], text: str) -> Callable[..., None]:
        """A stub for a kernel: Inductor calls this to have one compiled."""

        def kernel(*args: Any) -> None:
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            self._scribe.kernel(
                tensors,
                kinds=kinds,
                text=text,
                origins=self._origins(),
                phase=self._source.phase,
            )

        return kernel

    def _origins(self) -> tuple[str, ...]:
        """What the buffers computed that were new when this statement came."""
        new = [name for name in self._touched if name in self._named or name == self._target]
        self._touched = [name for name in self._touched if name not in new]
        return tuple(dict.fromkeys(v for n in new for v in self._source.origins.get(n, ())))

    def _empty(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        fresh = torch.empty_strided(shape, stride, dtype=dtype)
        self._scribe.allocate(fresh, name=f"{self._source.name}.{self._target}")
        return fresh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _OF_STUBS and func.namespace != "prim":
            self._scribe.call(
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


def _nothing(*_: Any) -> None:
    """The wrapper checks what it is given; fake tensors are what Inductor was told."""
