"""Graphs of single calls, made from live tensors, as capture would describe them."""

from collections.abc import Sequence

import torch

from steelyard.ir.graph import (
    Argument,
    Graph,
    Node,
    Output,
    OutputKind,
    Ref,
    Role,
    Storage,
    Tensor,
)


def described(value: torch.Tensor, storage: int) -> Tensor:
    return Tensor(
        shape=tuple(value.shape),
        stride=tuple(value.stride()),
        dtype=str(value.dtype).removeprefix("torch."),
        storage=storage,
    )


def graph_of(
    *calls: tuple[str, Sequence[object], Sequence[torch.Tensor]],
) -> Graph:
    """Each call is (operator, arguments, what it returns); tensors stand for themselves."""
    nodes: list[Node] = []
    storages: list[Storage] = []
    names: dict[int, str] = {}

    def store(value: torch.Tensor, role: Role) -> Tensor:
        storages.append(Storage(nbytes=value.untyped_storage().nbytes(), role=role))
        return described(value, len(storages) - 1)

    def argument(value: object) -> Argument:
        if isinstance(value, torch.Tensor):
            if id(value) not in names:
                names[id(value)] = f"input{len(names)}"
                nodes.append(
                    Node(
                        name=names[id(value)],
                        op="input",
                        outputs=(store(value, Role.PARAMETER),),
                    )
                )
            return Ref(names[id(value)])
        if isinstance(value, (list, tuple)):
            return tuple(argument(v) for v in value)
        return value  # type: ignore[return-value]  # plain values only, by construction

    for number, (op, given, results) in enumerate(calls):
        args = tuple(argument(a) for a in given)
        inputs = tuple(dict.fromkeys(_names_in(args)))
        outputs = tuple(store(r, Role.ACTIVATION) for r in results)
        nodes.append(
            Node(
                name=f"call{number}",
                op=op,
                args=args,
                inputs=inputs,
                outputs=outputs,
                signature=f"{op}({_said(given)})",
                moved_bytes=sum(t.nbytes for t in results) + 8 * len(inputs),
            )
        )
    loss = Output(kind=OutputKind.LOSS, node=nodes[-1].name)
    return Graph(
        nodes=tuple(nodes), storages=tuple(storages), outputs=(loss,), decomposition="none"
    )


def _names_in(argument: Argument) -> list[str]:
    if isinstance(argument, Ref):
        return [argument.name]
    if isinstance(argument, tuple):
        return [name for a in argument for name in _names_in(a)]
    return []


def _said(given: object) -> str:
    if isinstance(given, torch.Tensor):
        return f"{given.dtype}{list(given.shape)}{list(given.stride())}"
    if isinstance(given, (list, tuple)):
        return ";".join(_said(g) for g in given)
    return str(given)
