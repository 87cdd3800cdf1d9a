"""A step made up for counting: a chain of operators that each take a second and give a gradient.

Not a test: what the tests of exchanges share.
"""

from __future__ import annotations

from steelyard.hardware.cluster import Device, Link
from steelyard.ir.graph import (
    Graph,
    Node,
    Output,
    OutputKind,
    Phase,
    Ref,
    Role,
    Storage,
    Tensor,
)
from steelyard.ir.metrics import Estimate
from steelyard.predict.cost_table import CostTable, OperatorCost

# Calls and copies cost nothing, so that all seconds are those of the chain and of the link.
_DEVICE = Device(
    kind="made up",
    flops_per_second=float("inf"),
    bytes_per_second=float("inf"),
    memory_bytes=1 << 40,
    call_seconds=0.0,
)


def chain(*, gradients: int = 3, numel: int = 256, after: int = 0) -> Graph:
    """Return a program with backward lines ``work0..``, each of which reads the previous one and
    makes one gradient. After these are ``after`` lines for the new value of a buffer."""
    nodes: list[Node] = []
    storages: list[Storage] = []
    outputs: list[Output] = []

    def tensor(role: Role, *shape: int) -> Tensor:
        made = Tensor(shape=shape, stride=(1,) * len(shape), dtype="float32", storage=len(storages))
        storages.append(Storage(nbytes=made.nbytes, role=role))
        return made

    def line(name: str, *reads: str, shape: tuple[int, ...], phase: Phase) -> None:
        nodes.append(
            Node(
                name=name,
                op="aten.add.Tensor",
                args=tuple(Ref(r) for r in reads),
                inputs=reads,
                outputs=(tensor(Role.ACTIVATION, *shape),),
                phase=phase,
                signature="work",
            )
        )

    nodes += [
        Node(name=f"parameter:p{number}", op="input", outputs=(tensor(Role.PARAMETER, numel),))
        for number in range(gradients)
    ]
    nodes.append(Node(name="buffer:b", op="input", outputs=(tensor(Role.BUFFER, 1),)))
    nodes.append(Node(name="tangent", op="input", outputs=(tensor(Role.TANGENT),)))
    line("loss", "parameter:p0", shape=(), phase=Phase.FORWARD)
    outputs.append(Output(kind=OutputKind.LOSS, node="loss"))
    before = "tangent"
    for number in range(gradients):
        name, target = f"work{number}", f"parameter:p{number}"
        line(name, before, target, shape=(numel,), phase=Phase.BACKWARD)
        outputs.append(Output(kind=OutputKind.GRADIENT, node=name, target=target))
        before = name
    for number in range(after):
        line(f"after{number}", before, shape=(1,), phase=Phase.BACKWARD)
        before = f"after{number}"
    if after:
        outputs.append(Output(kind=OutputKind.UPDATE, node=before, target="buffer:b"))
    return Graph(
        nodes=tuple(nodes),
        storages=tuple(storages),
        outputs=tuple(outputs),
        decomposition="made up",
    )


def costs(*, exchange_seconds: float, nbytes: int = 1024, spread: float = 0.0) -> CostTable:
    """Return costs of one second per line, and a link on which ``nbytes`` take this long."""
    second = Estimate.within(1.0, share=spread)
    return CostTable(
        device=_DEVICE,
        operators={"work": OperatorCost(seconds=second, workspace_bytes=0)},
        whole_step=Estimate.exactly(1.0),
        links={
            "data": Link(
                kind="made up", latency_seconds=0.0, bytes_per_second=nbytes / exchange_seconds
            )
        },
    )
