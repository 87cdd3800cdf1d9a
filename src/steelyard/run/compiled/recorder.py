"""Writes down calls on fake tensors as the plain data of a program: nodes, storages, sinks.

A value is known by the storage it lies on; a buffer comes into being with the first call that
writes it. Not for where the calls come from: see lower.py.
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

_MOST_NAMED, _SEVERAL = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedKernel:
    """A generated kernel: what it is called with, its source, and the buffers it is the first to
    write."""

    kinds: tuple[str, ...]
    text: str
    fresh: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device], ...]

    def on(self, function: Callable[..., None]) -> Callable[..., Any]:
        """A call as others are: of arguments, for results on memory of their own."""

        def run(*args: torch.Tensor | int) -> Any:
            made = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for shape, stride, dtype, device in self.fresh
            ]
            function(*(made[a] if isinstance(a, int) else a for a in args))
            return made[0] if len(made) == 1 else tuple(made)

        return run


class ProgramRecorder:
    """``kernels`` are those written down so far, by their signatures."""

    def __init__(self, program: Program) -> None:
        self.kernels: dict[str, GeneratedKernel] = {}
        self._program = program
        self._node_of = {i.value: i.node for i in program.instructions if i.sink is None}
        self._line_of = {i.value: k for k, i in enumerate(program.instructions)}
        self._storages: list[Storage] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # a freed storage would lend its key to another
        self._bases: dict[int, tuple[str, Tensor]] = {}
        self._views: dict[tuple[str, Tensor], str] = {}
        self._fresh: dict[int, tuple[str, torch.Tensor]] = {}
        self._inputs: list[Node] = []
        self._nodes: list[Node] = []
        self._instructions: list[Instruction] = []
        self._outputs: list[Output] = []
        self._count = itertools.count()

    # --- what the lines begin with

    def input(self, name: str) -> torch.Tensor:
        """A fake tensor for one input of the program."""
        node = self._program.graph.by_name[name]
        planned = node.outputs[0]
        fake = torch.empty_strided(
            planned.shape, planned.stride, dtype=getattr(torch, planned.dtype)
        )
        old = self._program.graph.storages[planned.storage]
        self._take(fake, name, nbytes=old.nbytes, role=old.role)
        return fake

    def constant(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A fake tensor for a constant that the compiler folded; it is held like a buffer."""
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        self._take(fake, name, nbytes=value.untyped_storage().nbytes(), role=Role.CONSTANT)
        return fake

    def _take(self, fake: torch.Tensor, name: str, *, nbytes: int, role: Role) -> None:
        tensor = self._tensor(fake, nbytes=nbytes, role=role)
        self._bases[tensor.storage] = (name, tensor)
        self._inputs.append(Node(name=name, op="input", outputs=(tensor,)))

    def allocate(self, fake: torch.Tensor, *, name: str) -> None:
        """Memory for a buffer that a later call will write."""
        self._alive.append(fake)
        self._fresh[_torch.storage_key(fake)] = (name, fake)

    # --- the lines

    def kernel(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        kinds: Sequence[str],
        text: str,
        origins: Sequence[str],
        phase: Phase,
    ) -> None:
        """A generated kernel: it reads or writes each of these; of what it is the first to touch,
        the number stands among its arguments."""
        made = self._made(tensors)
        places = {_torch.storage_key(fake): place for place, (_, fake) in enumerate(made)}
        inputs = self._read(tensors, made)
        args: list[Ref | int] = []
        for tensor in tensors:
            place = places.get(_torch.storage_key(tensor))
            args.append(Ref(self._name(tensor)) if place is None else place)
        # Of one text, what one call is the first to write another may find written.
        written = [a if isinstance(a, int) else inputs.index(a.name) - len(inputs) for a in args]
        known = sha256(f"{text} {written}".encode()).hexdigest()[:16]
        node = Node(
            name=self._unique("kernel", phase),
            op=f"inductor.fused.{self._described(origins)}",
            args=tuple(args),
            inputs=inputs,
            phase=phase,
            moved_bytes=sum(map(_nbytes, tensors)),
            signature=f"kernel {known}",
        )
        fresh = tuple(
            (tuple(fake.shape), tuple(fake.stride()), fake.dtype, fake.device) for _, fake in made
        )
        self.kernels.setdefault(
            node.signature, GeneratedKernel(kinds=tuple(kinds), text=text, fresh=fresh)
        )
        self._add(node, made, origins)

    def call(
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
        """A call of a library's operator, which may allocate what it returns."""
        results = _tensors(result)
        given = _tensors((args, kwargs))
        made = self._made(given)
        written = {_torch.storage_key(fake) for _, fake in made}
        for place, tensor in enumerate(results):
            if not self._is_known(tensor) and _torch.storage_key(tensor) not in written:
                label = name or self._unique("call", phase)
                made.append((f"{label}.{place}" if len(results) > 1 else label, tensor))
                self._alive.append(tensor)
        if not made and not func._schema.is_mutable:
            return  # a view, which is written down where it is read
        func, kwargs = _functional(func, kwargs, [tensor for _, tensor in made])
        inputs = self._read(given, made)
        self._add(
            Node(
                name=self._unique(func.overloadpacket.__name__, phase),
                op=str(func),
                args=tuple(self._argument(a) for a in args),
                kwargs=tuple((key, self._argument(a)) for key, a in kwargs.items()),
                inputs=inputs,
                phase=phase,
                flops=flops_of_call(func, args, kwargs, result),
                moved_bytes=sum(map(_nbytes, (*given, *results))),
                is_random=_torch.draws(func, args, kwargs),
                signature=_signature(func, args, kwargs),
            ),
            made,
            origins,
        )

    def line(self, line: Instruction, values: Sequence[Any]) -> Any:
        """A call that is carried out as it stands; a tensor for its result, a tuple for several.

        What it is given is written down by the names that it has here.
        """
        old = self._program.graph
        node = old.by_name[line.node]
        given = dict(zip(node.inputs, values, strict=True))
        if node.is_getitem:
            return values[0][node.args[1]]
        results = tuple(self._lying(tensor, given) for tensor in node.outputs)
        if not node.is_view:
            self._stand(
                line, node.reading({n: self._name(fake) for n, fake in given.items()}), results
            )
        return results[0] if len(results) == 1 else results

    def _lying(self, planned: Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Where the graph says: on what the call is given, or on memory of its own."""
        old = self._program.graph
        for name, fake in given.items():
            (base,) = old.by_name[name].outputs
            if base.storage == planned.storage:
                offset = int(fake.storage_offset()) + planned.offset - base.offset
                return torch.as_strided(fake, planned.shape, planned.stride, offset)
        fake = torch.empty_strided(
            planned.shape, planned.stride, dtype=getattr(torch, planned.dtype)
        )
        self._tensor(fake, role=Role.ACTIVATION, nbytes=old.storages[planned.storage].nbytes)
        return fake

    def _stand(self, line: Instruction, node: Node, results: Sequence[torch.Tensor]) -> None:
        tensors = tuple(self._tensor(fake, role=Role.ACTIVATION) for fake in results)
        node = replace(node, name=line.value, outputs=tensors, phase=line.phase)
        self._append(node)
        self._take_apart(node, [f"{line.value}.{place}" for place in range(len(tensors))])
        if len(tensors) == 1:
            self._bases[tensors[0].storage] = (line.value, tensors[0])

    def serve(self, tensor: torch.Tensor, line: Instruction) -> None:
        """A value that leaves the program."""
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

    def _add(
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
        self._take_apart(node, [name for name, _ in made])
        if made and not several:
            self._bases[tensors[0].storage] = (node.name, tensors[0])

    def _take_apart(self, node: Node, names: Sequence[str]) -> None:
        """Several results by these names."""
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

    def _made(self, tensors: Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Those allocations that this call is the first to touch, so that it writes them."""
        keys = dict.fromkeys(map(_torch.storage_key, tensors))
        return [self._fresh.pop(key) for key in keys if key in self._fresh]

    def _read(
        self, tensors: Iterable[torch.Tensor], made: Sequence[tuple[str, torch.Tensor]]
    ) -> tuple[str, ...]:
        new = {_torch.storage_key(fake) for _, fake in made}
        old = (t for t in tensors if _torch.storage_key(t) not in new)
        return tuple(dict.fromkeys(self._name(t) for t in old))

    def _is_known(self, tensor: torch.Tensor) -> bool:
        key = _torch.storage_key(tensor)
        return key in self._numbers or key in self._fresh

    def _name(self, tensor: torch.Tensor) -> str:
        """The value that this tensor is: what lies on its storage, or a view of that."""
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
            self._alive.append(fake)
            held = int(fake.untyped_storage().nbytes()) if nbytes is None else nbytes
            self._storages.append(Storage(nbytes=held, role=role))
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

    # --- where a line comes from

    def _origin(self, origins: Sequence[str]) -> Node | None:
        """Of what a kernel computes, the value that comes last in the program."""
        last = max(origins, key=lambda v: self._line_of.get(v, -1), default=None)
        return self._program.graph.by_name[self._node_of[last]] if last in self._node_of else None

    def _described(self, origins: Sequence[str]) -> str:
        known = [v for v in origins if v in self._node_of]
        known.sort(key=self._line_of.__getitem__)
        nodes = [self._program.graph.by_name[self._node_of[v]] for v in known]
        names = list(dict.fromkeys(n.op.split(".")[1] for n in nodes if not n.is_free))
        more = ["more"] if len(names) > _MOST_NAMED else []
        return "_".join([*names[:_MOST_NAMED], *more]) or "copy"

    def _unique(self, name: str, phase: Phase) -> str:
        return f"{phase}.{name}.{next(self._count)}"


def _functional(
    func: Any, kwargs: Mapping[str, Any], made: Sequence[torch.Tensor]
) -> tuple[Any, Mapping[str, Any]]:
    """``mm.out`` into a buffer that is only now made is ``mm``, and costs what that costs."""
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
    """As capture writes it, so that what was measured for one runner serves the other."""
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
