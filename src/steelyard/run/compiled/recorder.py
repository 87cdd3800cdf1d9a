"""Records calls on fake tensors as the plain data of a program: nodes, storages, sinks.

A value is identified by its storage; a buffer becomes a value with the first call that writes it.
Not for making the calls: see lower.py.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch

from steelyard import _torch
from steelyard.ir.graph import (
    Argument,
    Node,
    Output,
    OutputKind,
    Phase,
    Ref,
    Role,
    Storage,
    Symbol,
    Tensor,
)
from steelyard.ir.program import Instruction, Program
from steelyard.operators.flops import flops_of_call

_MAX_NAMED, _SEVERAL = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedKernel:
    """A generated kernel: the kinds of its arguments, its source, and the buffers that it is the
    first to write.
    """

    kinds: tuple[str, ...]
    text: str
    fresh: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device], ...]

    def bind(self, function: Callable[..., None]) -> Callable[..., Any]:
        """Return a functional call of the compiled ``function``, which allocates the results that
        it writes.
        """

        def run(*args: torch.Tensor | int) -> Any:
            made = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for shape, stride, dtype, device in self.fresh
            ]
            function(*(made[a] if isinstance(a, int) else a for a in args))
            return made[0] if len(made) == 1 else tuple(made)

        return run


class ProgramRecorder:
    """Records a program; ``kernels`` holds the kernels recorded so far, by their signatures."""

    def __init__(self, program: Program) -> None:
        self.kernels: dict[str, GeneratedKernel] = {}
        self._program = program
        self._node_of = {i.value: i.node for i in program.instructions if i.sink is None}
        self._line_of = {i.value: k for k, i in enumerate(program.instructions)}
        self._storages: list[Storage] = []
        self._numbers: dict[int, int] = {}
        self._keepalive: list[torch.Tensor] = []  # the key of a freed storage could be reused
        self._bases: dict[int, tuple[str, Tensor]] = {}
        self._views: dict[tuple[str, Tensor], str] = {}
        self._unwritten: dict[int, tuple[str, torch.Tensor]] = {}
        self._inputs: list[Node] = []
        self._nodes: list[Node] = []
        self._instructions: list[Instruction] = []
        self._outputs: list[Output] = []
        self._count = itertools.count()

    # --- inputs

    def input(self, name: str) -> torch.Tensor:
        """Return a fake tensor for an input of the program."""
        node = self._program.graph.by_name[name]
        planned = node.outputs[0]
        fake = torch.empty_strided(
            planned.shape, planned.stride, dtype=getattr(torch, planned.dtype)
        )
        storage = self._program.graph.storages[planned.storage]
        self._add_input(fake, name, nbytes=storage.nbytes, role=storage.role)
        return fake

    def constant(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor for a constant that the compiler folded; like a buffer, it is
        resident.
        """
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        self._add_input(fake, name, nbytes=value.untyped_storage().nbytes(), role=Role.CONSTANT)
        return fake

    def _add_input(self, fake: torch.Tensor, name: str, *, nbytes: int, role: Role) -> None:
        tensor = self._tensor(fake, nbytes=nbytes, role=role)
        self._bases[tensor.storage] = (name, tensor)
        self._inputs.append(Node(name=name, op="input", outputs=(tensor,)))

    def allocate(self, fake: torch.Tensor, *, name: str) -> None:
        """Record memory that a later call will write."""
        self._keepalive.append(fake)
        self._unwritten[_torch.storage_key(fake)] = (name, fake)

    # --- the lines

    def add_kernel(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        kinds: Sequence[str],
        text: str,
        origins: Sequence[str],
        phase: Phase,
    ) -> None:
        """Record a generated kernel. An argument that it is the first to write is given as the
        index of a result.
        """
        made = self._first_written(tensors)
        places = {_torch.storage_key(fake): place for place, (_, fake) in enumerate(made)}
        inputs = self._names_read(tensors, made)
        args: list[Ref | int] = []
        for tensor in tensors:
            place = places.get(_torch.storage_key(tensor))
            args.append(Ref(self._name(tensor)) if place is None else place)
        # Calls of the same source may differ in which buffers they are the first to write.
        written = [a if isinstance(a, int) else inputs.index(a.name) - len(inputs) for a in args]
        digest = sha256(f"{text} {written}".encode()).hexdigest()[:16]
        node = Node(
            name=self._unique("kernel", phase),
            op=f"inductor.fused.{self._kernel_name(origins)}",
            args=tuple(args),
            inputs=inputs,
            phase=phase,
            moved_bytes=sum(map(_nbytes, tensors)),
            signature=f"kernel {digest}",
        )
        fresh = tuple(
            (tuple(fake.shape), tuple(fake.stride()), fake.dtype, fake.device) for _, fake in made
        )
        self.kernels.setdefault(
            node.signature, GeneratedKernel(kinds=tuple(kinds), text=text, fresh=fresh)
        )
        self._add_node(node, made, origins)

    def add_call(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        *,
        name: str,
        origins: Sequence[str],
        phase: Phase,
    ) -> None:
        """Record a library call, which may allocate its results."""
        results = _tensors(result)
        arguments = _tensors((args, kwargs))
        made = self._first_written(arguments)
        written = {_torch.storage_key(fake) for _, fake in made}
        for place, tensor in enumerate(results):
            if not self._is_known(tensor) and _torch.storage_key(tensor) not in written:
                label = name or self._unique("call", phase)
                made.append((f"{label}.{place}" if len(results) > 1 else label, tensor))
                self._keepalive.append(tensor)
        if not made and not func._schema.is_mutable:
            return  # a view, which is recorded when it is read
        func, kwargs = _functional(func, kwargs, [tensor for _, tensor in made])
        inputs = self._names_read(arguments, made)
        self._add_node(
            Node(
                name=self._unique(func.overloadpacket.__name__, phase),
                op=str(func),
                args=tuple(self._argument(a) for a in args),
                kwargs=tuple((key, self._argument(a)) for key, a in kwargs.items()),
                inputs=inputs,
                phase=phase,
                flops=flops_of_call(func, args, kwargs, result),
                moved_bytes=sum(map(_nbytes, (*arguments, *results))),
                is_random=_torch.draws(func, args, kwargs),
                signature=_signature(func, args, kwargs),
            ),
            made,
            origins,
        )

    def add_line(self, line: Instruction, values: Sequence[Any]) -> Any:
        """Record an uncompiled line; return a tensor for its result, or a tuple for several.

        Its inputs are recorded by their names in the new program.
        """
        graph = self._program.graph
        node = graph.by_name[line.node]
        inputs = dict(zip(node.inputs, values, strict=True))
        if node.is_getitem:
            return values[0][node.args[1]]
        results = tuple(self._result(tensor, inputs) for tensor in node.outputs)
        if not node.is_view:
            self._append_line(
                line, node.reading({n: self._name(fake) for n, fake in inputs.items()}), results
            )
        return results[0] if len(results) == 1 else results

    def _result(self, planned: Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a result in the storage that the graph gives it: that of an input, or a new
        one.
        """
        graph = self._program.graph
        for name, fake in inputs.items():
            (base,) = graph.by_name[name].outputs
            if base.storage == planned.storage:
                offset = int(fake.storage_offset()) + planned.offset - base.offset
                return torch.as_strided(fake, planned.shape, planned.stride, offset)
        fake = torch.empty_strided(
            planned.shape, planned.stride, dtype=getattr(torch, planned.dtype)
        )
        self._tensor(fake, role=Role.ACTIVATION, nbytes=graph.storages[planned.storage].nbytes)
        return fake

    def _append_line(self, line: Instruction, node: Node, results: Sequence[torch.Tensor]) -> None:
        tensors = tuple(self._tensor(fake, role=Role.ACTIVATION) for fake in results)
        node = replace(node, name=line.value, outputs=tensors, phase=line.phase)
        self._append(node)
        self._append_getitems(node, [f"{line.value}.{place}" for place in range(len(tensors))])
        if len(tensors) == 1:
            self._bases[tensors[0].storage] = (line.value, tensors[0])

    def add_output(self, tensor: torch.Tensor, line: Instruction) -> None:
        """Record an output of the program."""
        assert line.sink is not None
        name = self._name(tensor)
        output = replace(line.sink, node=name)
        self._outputs.append(output)
        self._instructions.append(replace(line, node=name, inputs=(name,), sink=output))

    def program(self, *, loss: torch.Tensor) -> Program:
        name = self._name(loss)
        old = self._program
        graph = replace(
            old.graph,
            nodes=(*self._inputs, *self._nodes),
            storages=tuple(self._storages),
            outputs=(Output(kind=OutputKind.LOSS, node=name), *self._outputs),
            decomposition=f"{old.graph.decomposition} lowered",
            runs=(),
        )
        return replace(old, graph=graph, instructions=tuple(self._instructions), loss=name)

    # --- values and storages

    def _add_node(
        self,
        node: Node,
        made: Sequence[tuple[str, torch.Tensor]],
        origins: Sequence[str],
    ) -> None:
        tensors = [self._tensor(fake, role=Role.ACTIVATION) for _, fake in made]
        origin = self._origin(origins)
        path, line = (origin.path, origin.line) if origin else ("", "")
        several = len(made) > 1
        if not several and made:
            node = replace(node, name=made[0][0])
        node = replace(node, outputs=tuple(tensors), path=path, line=line)
        self._append(node)
        self._append_getitems(node, [name for name, _ in made])
        if made and not several:
            self._bases[tensors[0].storage] = (node.name, tensors[0])

    def _append_getitems(self, node: Node, names: Sequence[str]) -> None:
        """Append a getitem node for each result, if there are several."""
        if len(node.outputs) < _SEVERAL:
            return
        for place, (name, tensor) in enumerate(zip(names, node.outputs, strict=True)):
            self._append(
                Node(
                    name=name,
                    op="getitem",
                    args=(Ref(node.name), place),
                    inputs=(node.name,),
                    outputs=(tensor,),
                    phase=node.phase,
                    is_view=True,
                    path=node.path,
                    line=node.line,
                )
            )
            self._bases[tensor.storage] = (name, tensor)

    def _append(self, node: Node) -> None:
        self._nodes.append(node)
        self._instructions.append(
            Instruction(node=node.name, value=node.name, inputs=node.inputs, phase=node.phase)
        )

    def _first_written(self, tensors: Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Return the allocations that this call is the first to use; these are the ones that it
        writes.
        """
        keys = dict.fromkeys(map(_torch.storage_key, tensors))
        return [self._unwritten.pop(key) for key in keys if key in self._unwritten]

    def _names_read(
        self, tensors: Iterable[torch.Tensor], made: Sequence[tuple[str, torch.Tensor]]
    ) -> tuple[str, ...]:
        new = {_torch.storage_key(fake) for _, fake in made}
        old = (t for t in tensors if _torch.storage_key(t) not in new)
        return tuple(dict.fromkeys(self._name(t) for t in old))

    def _is_known(self, tensor: torch.Tensor) -> bool:
        key = _torch.storage_key(tensor)
        return key in self._numbers or key in self._unwritten

    def _name(self, tensor: torch.Tensor) -> str:
        """Return the value of this tensor: the one on its storage, or a view of it."""
        described = self._tensor(tensor, role=Role.ACTIVATION)
        name, base = self._bases[described.storage]
        if described == base:
            return name
        view = self._views.get((name, described))
        if view is None:
            view = self._views[name, described] = self._unique("view", Phase.FORWARD)
            self._append(
                Node(
                    name=view,
                    op="aten.as_strided.default",
                    args=(Ref(name), described.shape, described.stride, described.offset),
                    inputs=(name,),
                    outputs=(described,),
                    is_view=True,
                )
            )
        return view

    def _tensor(self, fake: torch.Tensor, *, role: Role, nbytes: int | None = None) -> Tensor:
        key = _torch.storage_key(fake)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._storages)
            self._keepalive.append(fake)
            size = int(fake.untyped_storage().nbytes()) if nbytes is None else nbytes
            self._storages.append(Storage(nbytes=size, role=role))
        return Tensor(
            shape=tuple(int(s) for s in fake.shape),
            stride=tuple(int(s) for s in fake.stride()),
            dtype=str(fake.dtype).removeprefix("torch."),
            storage=number,
            offset=int(fake.storage_offset()),
        )

    def _argument(self, value: Any) -> Argument:
        match value:
            case torch.Tensor():
                return Ref(self._name(value)) if self._is_known(value) else None
            case list() | tuple():
                return tuple(self._argument(v) for v in value)
            case None | bool() | int() | float() | complex() | str():
                return value
            case torch.device():
                return Symbol(f"torch.device({str(value)!r})")
        return Symbol(str(value))

    # --- origins

    def _origin(self, origins: Sequence[str]) -> Node | None:
        """Return the node of the last of these values in program order."""
        last = max(origins, key=lambda v: self._line_of.get(v, -1), default=None)
        return self._program.graph.by_name[self._node_of[last]] if last in self._node_of else None

    def _kernel_name(self, origins: Sequence[str]) -> str:
        in_program = [v for v in origins if v in self._node_of]
        in_program.sort(key=self._line_of.__getitem__)
        nodes = [self._program.graph.by_name[self._node_of[v]] for v in in_program]
        names = list(dict.fromkeys(n.op.split(".")[1] for n in nodes if not n.is_free))
        rest = ["more"] if len(names) > _MAX_NAMED else []
        return "_".join([*names[:_MAX_NAMED], *rest]) or "copy"

    def _unique(self, name: str, phase: Phase) -> str:
        return f"{phase}.{name}.{next(self._count)}"


def _functional(
    func: Any, kwargs: Mapping[str, Any], made: Sequence[torch.Tensor]
) -> tuple[Any, Mapping[str, Any]]:
    """Replace ``mm.out`` into a new buffer with ``mm``, which costs the same."""
    out = kwargs.get("out")
    plain = getattr(func.overloadpacket, "default", None)
    if out is None or plain is None or not any(out is fake for fake in made):
        return func, kwargs
    names = [a.name for a in func._schema.arguments if a.name != "out"]
    if [a.name for a in plain._schema.arguments] != names:
        return func, kwargs
    return plain, {key: value for key, value in kwargs.items() if key != "out"}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _torch.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _signature(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the call's signature in the form that capture uses, so that both runners share
    measurements.
    """
    parts = [_describe(a) for a in args]
    parts += [f"{key}={_describe(a)}" for key, a in kwargs.items()]
    return f"{func}({';'.join(parts)})"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        note = "" if value.is_contiguous() else f"~{list(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{note}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_describe(v) for v in value)}]"
    return str(value)
