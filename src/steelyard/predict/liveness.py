"""Memory liveness of a program: the bytes alive at each line, and the tensors alive at its peak.

It follows the rules by which run/ frees memory: a value dies after the last line that reads it, a
storage dies with its last value, a kernel's workspace dies within its own line, and a backend's
buffers for an exchange die at the line that waits for it. Not for seconds: see timeline.py.
"""

from dataclasses import dataclass

from steelyard.ir.graph import OFFLOAD_CALLS, Graph, Node, OutputKind, Role
from steelyard.ir.program import Instruction, Program, Underway
from steelyard.ir.quantized_activation import DECODE, ENCODE
from steelyard.plans.peak_memory import LiveTensor
from steelyard.predict.cost_table import CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The bytes, beyond the resident ones, while each line runs and after the last line."""

    bytes_at: tuple[int, ...]
    left_bytes: int
    peak_index: int

    @property
    def peak_bytes(self) -> int:
        return self.bytes_at[self.peak_index] if self.bytes_at else 0


def liveness(program: Program, costs: CostTable | None, *, accumulating: bool = False) -> Liveness:
    """Return the liveness of a program.

    ``accumulating`` means that gradients already exist and new ones are added to them, so that no
    new gradient is saved. Without ``costs``, kernel workspaces are left out, because they are only
    known from measurements.
    """
    births, deaths = _lifetimes(program, accumulating=accumulating)
    for exchange, nbytes in held_underway(program):
        births[exchange.issue] += nbytes
        if exchange.wait is not None:
            deaths[exchange.wait] += nbytes
    nodes = program.graph.by_name
    alive = 0
    bytes_at: list[int] = []
    for index, instruction in enumerate(program.instructions):
        alive += births[index]
        workspace = 0
        if costs is not None and instruction.sink is None:
            workspace = costs.workspace_bytes(nodes[instruction.node])
        bytes_at.append(alive + workspace)
        alive -= deaths[index]
    peak = max(range(len(bytes_at)), key=bytes_at.__getitem__, default=0)
    return Liveness(bytes_at=tuple(bytes_at), left_bytes=alive, peak_index=peak)


def alive_at(program: Program, index: int, *, accumulating: bool = False) -> tuple[LiveTensor, ...]:
    """Return the tensors, beyond the resident bytes, while line ``index`` runs, largest first."""
    graph = program.graph
    owners, last = owners_and_last_reads(program, accumulating=accumulating)
    found = []
    for key, (born, instruction) in owners.items():
        if born <= index <= last[key]:
            node = graph.by_name[instruction.node]
            found.append(
                LiveTensor(
                    nbytes=graph.storages[key[0]].nbytes,
                    what=label_of(graph, instruction),
                    path=node.path,
                    line=node.line,
                    phase=node.phase,
                    role=Role.ACTIVATION,
                )
            )
    found += [
        in_flight_tensor(program.graph.by_name[program.instructions[exchange.issue].node], nbytes)
        for exchange, nbytes in held_underway(program)
        if exchange.issue <= index and (exchange.wait is None or index <= exchange.wait)
    ]
    return tuple(sorted(found, key=lambda h: -h.nbytes))


def label_of(graph: Graph, instruction: Instruction) -> str:
    node = graph.by_name[instruction.node]
    if node.is_transfer and node.op in _FETCHES:
        how = "in slices" if node.args[1:] else "fetched"
        return f"{_FETCHES[node.op]} ({how})"
    if node.is_transfer:
        # The name is that of the value that is fetched.
        how = "in slices" if node.is_slicing else "fetched"
        return f"{graph.by_name[node.name.rpartition('.')[0]].op} ({how})"
    if node.op == ENCODE:
        return f"{graph.by_name[node.inputs[0]].op} (in 8 bits)"
    if node.op == DECODE:
        (encode,) = node.inputs
        return f"{graph.by_name[graph.by_name[encode].inputs[0]].op} (dequantized)"
    return node.op + (" (recomputed)" if instruction.is_recomputed else "")


_FETCHES = {
    f"{OFFLOAD_CALLS}{call}_{kind}": name
    for call in ("fetch", "fetched", "begin", "room")
    for kind, name in (("weight", "weight"), ("gradient", "gradient"), ("state", "optimizer state"))
}


def held_underway(program: Program) -> list[tuple[Underway, int]]:
    """Return the bytes that the backend allocates for each exchange in flight."""
    nodes = program.graph.by_name
    found = []
    for exchange in program.exchanges:
        collective = nodes[program.instructions[exchange.issue].node].collective
        if collective is not None and collective.held_bytes:
            found.append((exchange, collective.held_bytes))
    return found


def in_flight_tensor(node: Node, nbytes: int) -> LiveTensor:
    what = f"{node.op} (in flight)"
    return LiveTensor(
        nbytes=nbytes, what=what, path=node.path, line=node.line, phase=node.phase,
        role=Role.ACTIVATION,
    )  # fmt: skip


# A storage of the graph may exist several times in a program, once for each time that it is
# computed. The key is therefore the storage with the number of the copy.
StorageCopy = tuple[int, int]


def _lifetimes(program: Program, *, accumulating: bool) -> tuple[list[int], list[int]]:
    """Return the bytes allocated and the bytes freed at each line."""
    births = [0] * len(program.instructions)
    deaths = [0] * len(program.instructions)
    owners, last = owners_and_last_reads(program, accumulating=accumulating)
    storages = program.graph.storages
    for key, (born, _) in owners.items():
        nbytes = storages[key[0]].nbytes
        births[born] += nbytes
        if last[key] < len(deaths):
            deaths[last[key]] += nbytes
    return births, deaths


def owners_and_last_reads(
    program: Program, *, accumulating: bool
) -> tuple[dict[StorageCopy, tuple[int, Instruction]], dict[StorageCopy, int]]:
    """Return the line that made each storage copy, and the last line that reads a value on it."""
    graph = program.graph
    resident = _resident(graph)
    on: dict[str, tuple[StorageCopy, ...]] = {}
    owners: dict[StorageCopy, tuple[int, Instruction]] = {}
    last: dict[StorageCopy, int] = {}
    copies: dict[int, int] = {}
    end = len(program.instructions)
    for index, instruction in enumerate(program.instructions):
        for name in instruction.inputs:
            for key in on.get(name, ()):
                last[key] = max(last[key], index)
        if instruction.sink is not None:
            kind = instruction.sink.kind
            survives = kind is OutputKind.CARRIED or (
                kind is OutputKind.GRADIENT and not accumulating
            )
            for key in on.get(instruction.inputs[0], ()):
                last[key] = end if survives else last[key]
            continue
        inherited = {key[0]: key for name in instruction.inputs for key in on.get(name, ())}
        keys: list[StorageCopy] = []
        for storage in graph.storages_of(instruction.node):
            if storage in resident:
                continue
            if storage in inherited:
                keys.append(inherited[storage])
                continue
            copies[storage] = copies.get(storage, 0) + 1
            key = (storage, copies[storage])
            owners[key] = (index, instruction)
            last[key] = index
            keys.append(key)
        on[instruction.value] = tuple(keys)
    for key in on.get(program.loss, ()):
        last[key] = end
    return owners, last


def _resident(graph: Graph) -> set[int]:
    return {t.storage for node in graph.inputs() for t in node.outputs}
