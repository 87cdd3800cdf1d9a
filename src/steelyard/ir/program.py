"""The step as executed, instruction by instruction: predict/ prices it and run/ executes it.

A program contains every decision; its executors make none. Not for choosing: see search/.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from steelyard.hardware.cluster import offload_room
from steelyard.ir.collective import Collective
from steelyard.ir.gradient_codec import FIRST_CALLS
from steelyard.ir.graph import Argument, Graph, Node, Output, OutputKind, Phase, Role
from steelyard.ir.parallel_layout import ALONE, DATA, ParallelLayout
from steelyard.ir.pipeline_schedule import Order
from steelyard.ir.pipeline_stages import PipelineStages
from steelyard.ir.quantized_activation import ENCODE
from steelyard.ir.sharding_choice import ShardingChoice

# Name prefix of the inputs that hold the sums of the earlier micro-batches, for the last one: the
# gradient of each parameter, and the loss.
SO_FAR = "so far:"
LOSS_SO_FAR = f"{SO_FAR}loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """Compute ``node`` from ``inputs`` and call the result ``value``.

    ``value`` is the node's own name, or another name if the node is recomputed. An instruction with
    ``sink`` computes nothing: its one input leaves the program. A gradient is added to that of its
    parameter; an updated buffer replaces the old one.
    """

    node: str
    value: str
    inputs: tuple[str, ...]
    phase: Phase
    sink: Output | None = None

    @property
    def is_recomputed(self) -> bool:
        return self.sink is None and self.value != self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class Underway:
    """A collective in flight: the line that issues it, and the line that waits for it, if any."""

    issue: int
    wait: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """The pipeline execution of a program: its stages, their ranks and their schedule.

    ``updates`` are the optimizer steps of the ranks, each on the parameters of its stages.
    ``is_pinned``: ranks send messages through shared memory. ``is_by_host``: other messages go
    through host memory, because the step runs in device memory.
    """

    schedule: str
    stages: PipelineStages
    order: Order
    updates: tuple["Program", ...] = ()
    is_pinned: bool = False
    is_by_host: bool = False

    def held(self, rank: int) -> frozenset[str]:
        """The model's tensors that stages of this rank read, or whose gradients they compute."""
        rank_of = self.order.rank_of
        own = (s for s in self.stages.stages if rank_of[s.index] == rank)
        return frozenset(name for stage in own for name in stage.held)

    def trained(self, rank: int) -> tuple[str, ...]:
        """The parameters whose gradients this rank has; shared parameters count on every rank."""
        rank_of = self.order.rank_of
        own = [stage for stage in self.stages.stages if rank_of[stage.index] == rank]
        shared = (name for name, where in self.stages.shared if any(s.index in where for s in own))
        return tuple(dict.fromkeys((*(n for stage in own for n in stage.trained), *shared)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """Straight-line code over a graph, run ``repeats`` times per step on equal micro-batches.

    The last micro-batch runs this program to its end; the micro-batches before it run ``earlier``.
    With a ``layout`` this is the program of ``rank``. Ranks with equal batch shares run the same
    program; ``sibling_programs`` has one program for each other share. ``before`` overrides the
    program of the earlier micro-batches if it cannot be derived from the instructions.
    ``shardings`` list the sharded tensors of the model, in the order in which they are sharded.
    ``update`` is the optimizer step that follows; an update has no ``loss``. ``undivided`` is the
    reason why the update cannot run one parameter at a time. ``unsliceable`` gives, for each
    parameter, the reason why it cannot run on some rows at a time, and ``unshardable`` the reason
    why sharded parameters would change its result. With a ``pipeline``, the instructions are those
    of all stages and each rank runs its own.
    """

    graph: Graph
    instructions: tuple[Instruction, ...]
    loss: str = ""
    repeats: int = 1
    layout: ParallelLayout = ALONE
    rank: int = 0
    sibling_programs: tuple["Program", ...] = ()
    before: "Program | None" = None
    shardings: tuple[ShardingChoice, ...] = ()
    pipeline: Pipeline | None = None
    update: "Program | None" = None
    undivided: str = ""
    unshardable: str = ""
    unsliceable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def plain(cls, graph: Graph, *, update: "Program | None" = None, rank: int = 0) -> Self:
        """Return the graph as captured: every value that the backward pass needs is saved."""
        computed = [as_captured(graph, name) for name in order_of(graph)]
        return replace(cls.of(graph, computed, update=update), rank=rank)

    @classmethod
    def of(
        cls,
        graph: Graph,
        computed: Iterable[Instruction],
        *,
        update: "Program | None" = None,
    ) -> Self:
        """Return the program of these instructions; each output leaves it after its last reader."""
        instructions = list(computed)
        last_read: dict[str, int] = {}
        for index, instruction in enumerate(instructions):
            last_read[instruction.value] = index
            for name in instruction.inputs:
                last_read[name] = index
        inputs = {node.name: node for node in graph.inputs()}
        is_overwriting = any(output.kind is OutputKind.UPDATE for output in graph.outputs)
        last_storage_read = _last_reads(graph, instructions) if is_overwriting else {}
        sinks_after: dict[int, list[Instruction]] = {}
        for output in graph.outputs:
            if output.kind is OutputKind.LOSS:
                continue
            index = last_read.get(output.node, -1)
            if output.kind is OutputKind.UPDATE:
                # An update must not overwrite the old value while a later line still reads it.
                old = {t.storage for t in inputs[output.target].outputs}
                index = max(index, *(last_storage_read.get(storage, -1) for storage in old))
            sink = Instruction(
                node=output.node,
                value="",
                inputs=(output.node,),
                phase=instructions[index].phase if index >= 0 else Phase.FORWARD,
                sink=output,
            )
            sinks_after.setdefault(index, []).append(sink)
        placed = list(sinks_after.get(-1, []))
        for index, instruction in enumerate(instructions):
            placed.append(instruction)
            placed += sinks_after.get(index, [])
        # A pipeline stage may have no loss.
        loss = next((o.node for o in graph.outputs if o.kind is OutputKind.LOSS), "")
        return cls(graph=graph, instructions=tuple(placed), loss=loss, update=update)

    def with_lines(self, computed: Iterable[Instruction], *, on: Graph) -> "Program":
        """Return the same step with other instructions, over the graph ``on``."""
        rewritten = Program.of(on, computed)
        return replace(self, graph=on, instructions=rewritten.instructions, loss=rewritten.loss)

    def with_graph(self, graph: Graph) -> "Program":
        """Return the same step over another graph, in captured order."""
        known = {line.value: line for line in self.instructions if line.sink is None}
        return self.with_lines(
            (as_captured(graph, name, known.get(name)) for name in order_of(graph)), on=graph
        )

    def as_graph(self) -> Graph:
        """Return a graph with one node for each instruction; a recomputed value gets a second
        node.
        """
        graph, storages = self.graph, list(self.graph.storages)
        nodes = list(graph.inputs())
        storages_by_value = {
            node.name: {t.storage: t.storage for t in node.outputs} for node in nodes
        }
        written: set[int] = set()
        for line in self.instructions:
            if line.sink is not None:
                continue
            node = graph.by_name[line.node]
            storage_of = {
                old: new for name in line.inputs for old, new in storages_by_value[name].items()
            }
            for storage in graph.storages_of(line.node):
                if storage in written and storage not in storage_of:
                    storage_of[storage] = len(storages)
                    storages.append(storages[storage])
                storage_of.setdefault(storage, storage)
                written.add(storage)
            storages_by_value[line.value] = {s: storage_of[s] for s in graph.storages_of(line.node)}
            reading = node.reading(dict(zip(node.inputs, line.inputs)))
            outputs = tuple(replace(t, storage=storage_of[t.storage]) for t in node.outputs)
            nodes.append(replace(reading, name=line.value, outputs=outputs, phase=line.phase))
        return replace(graph, nodes=tuple(nodes), storages=tuple(storages))

    def repeated(self, times: int) -> "Program":
        return replace(self, repeats=times)

    @property
    def parts(self) -> int:
        """Number of micro-batches over all ranks; all equal if ranks have equal batch shares."""
        return self.repeats * self.layout.data

    @property
    def units(self) -> int:
        """Number of equal units in the global batch; a micro-batch has ``share`` of them."""
        return self.repeats * self.layout.units

    @property
    def share(self) -> int:
        return self.layout.share_of(self.rank)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the global batch, which every rank receives as a whole."""
        return self.graph.resident_bytes(Role.BATCH) * self.units // self.share

    @cached_property
    def earlier(self) -> "Program":
        """The program of all micro-batches but the last; it does not exchange the sums."""
        if self.before is not None:
            return self.before
        graph = self.graph
        dependent = {n.name for n in graph.inputs() if n.name.startswith(SO_FAR)}
        if not dependent:
            return self
        local_values: dict[str, str] = {}
        for node in graph.nodes:
            if dependent.intersection(node.inputs):
                if LOSS_SO_FAR in node.inputs:
                    local_values = {o.node: name for o in graph.outputs if o.kind is OutputKind.LOSS
                           for name in node.inputs if name != LOSS_SO_FAR}  # fmt: skip
                dependent.add(node.name)
        remaining = (o for o in graph.outputs if o.kind is not OutputKind.SUMMED)
        outputs = tuple(replace(o, node=local_values.get(o.node, o.node)) for o in remaining)
        nodes = tuple(node for node in graph.nodes if node.name not in dependent)
        return replace(
            self,
            graph=replace(graph, nodes=nodes, outputs=outputs),
            instructions=tuple(i for i in self.instructions if i.node not in dependent),
            loss=local_values.get(self.loss, self.loss),
        )

    @property
    def passes(self) -> tuple["Program", ...]:
        """The programs of all micro-batches, in order."""
        return (self.earlier,) * (self.repeats - 1) + (self,)

    @cached_property
    def in_shares(self) -> frozenset[str]:
        """The parameters that are sharded by rows over the data-parallel ranks."""
        return frozenset(n for p in self.shardings if p.axis == DATA for n, _ in p.inputs)

    @cached_property
    def collective_order(self) -> tuple[str, ...]:
        """The order of collectives and gradients, which must be the same on all ranks."""
        nodes, position = self.graph.by_name, self.graph.position
        issued = (nodes[self.instructions[e.issue].node].collective for e in self.exchanges)
        gradients = (o for o in self.graph.outputs if o.kind is OutputKind.GRADIENT)
        arriving = sorted((position[o.node], o.target) for o in gradients)
        return (*map(str, issued), *(target for _, target in arriving))

    @cached_property
    def recomputed(self) -> tuple[Instruction, ...]:
        """The instructions that recompute a value."""
        return tuple(i for i in self.instructions if i.is_recomputed)

    @cached_property
    def quantized(self) -> tuple[str, ...]:
        """The activations that are saved in 8 bits."""
        nodes = (self.graph.by_name[i.node] for i in self.instructions)
        return tuple(node.inputs[0] for node in nodes if node.op == ENCODE)

    @cached_property
    def sends_codes(self) -> bool:
        """True if gradients are exchanged in compressed form, as codes or low-rank factors."""
        return any(node.op in FIRST_CALLS for node in self.graph.nodes)

    @property
    def is_lossy(self) -> bool:
        return bool(self.quantized) or self.sends_codes

    @cached_property
    def flops(self) -> int:
        nodes = self.graph.by_name
        return self.repeats * sum(nodes[i.node].flops for i in self.instructions if i.sink is None)

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to other ranks in a step."""
        return sum(c.sent_bytes for c in self._issued)

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends in a step, including the backend's message headers."""
        return sum(c.wire_bytes for c in self._issued)

    @cached_property
    def _issued(self) -> tuple[Collective, ...]:
        """The collectives of a step, including those of the update."""
        once = self.update._issued if self.update is not None else ()
        return once + tuple(c for each in self.passes for c in each._issued_in_a_pass)

    @cached_property
    def _issued_in_a_pass(self) -> tuple[Collective, ...]:
        nodes = self.graph.by_name
        issued = (nodes[self.instructions[e.issue].node].collective for e in self.exchanges)
        return tuple(c for c in issued if c is not None)

    @cached_property
    def offload_bytes(self) -> int:
        """Bytes allocated in offload memory, in whole pages for each value."""
        slots = [n for name, n in self._offloaded_sizes().items() if not isinstance(name, str)]
        return sum(map(offload_room, (*self.offloaded_nbytes.values(), *slots)))

    @cached_property
    def offloaded_nbytes(self) -> dict[str, int]:
        """Bytes of each value that owns a permanent allocation in offload memory, by name."""
        update = {} if self.update is None else self.update.offloaded_nbytes
        return update | {k: n for k, n in self._offloaded_sizes().items() if isinstance(k, str)}

    def _offloaded_sizes(self) -> dict[Argument, int]:
        nodes = self.graph.by_name
        moving = (nodes[self.instructions[e.issue].node] for e in self.exchanges)
        return {
            n.args[0]: n.collective.sent_bytes for n in moving if n.is_transfer and n.collective
        }

    @cached_property
    def is_moving(self) -> bool:
        """True if any value is copied to or from offload memory."""
        moves = any(node.is_transfer for node in self.graph.nodes)
        return moves or (self.update is not None and self.update.is_moving)

    @cached_property
    def exchanges(self) -> tuple[Underway, ...]:
        """Every collective, in the order of issue."""
        if not self.graph.collectives:
            return ()
        nodes = self.graph.by_name
        issued: dict[str, int] = {}
        waited: dict[str, int] = {}
        for index, instruction in enumerate(self.instructions):
            if instruction.sink is not None:
                continue
            node = nodes[instruction.node]
            if node.collective is not None:
                issued[instruction.value] = index
            if node.waits_for:
                waited[_awaited(node, instruction)] = index
        return tuple(Underway(issue=i, wait=waited.get(v)) for v, i in issued.items())

    def problems(self) -> list[str]:
        """Return the reasons why the program is invalid; empty for a valid program."""
        have = {node.name for node in self.graph.inputs()}
        found: list[str] = []
        for instruction in self.instructions:
            label = instruction.value or f"sink of {instruction.node}"
            found += [
                f"{label} reads {i} before it exists" for i in instruction.inputs if i not in have
            ]
            if instruction.sink is None:
                if instruction.value in have:
                    found.append(f"{instruction.value} is computed twice under the same name")
                have.add(instruction.value)
        if self.loss and self.loss not in have:
            found.append("the loss is never computed")
        return found + self._read_early()

    def _read_early(self) -> list[str]:
        """Return a problem for each result that is read or dropped before it has arrived."""
        problems = []
        for exchange in self.exchanges:
            value = self.instructions[exchange.issue].value
            if exchange.wait is None:
                problems.append(f"nothing waits for {value}")
            problems += [
                f"{i.value or f'sink of {i.node}'} reads {value} while it is in flight"
                for index, i in enumerate(self.instructions)
                if value in i.inputs and index != exchange.wait
            ]
        return problems + self._summed_early()

    def _summed_early(self) -> list[str]:
        """Return a problem for each sum that is read before this micro-batch was added to it."""
        missing = {n.name for n in self.graph.inputs() if n.name.startswith(SO_FAR)} - {LOSS_SO_FAR}
        found = []
        for line in self.instructions:
            if line.sink is not None and line.sink.kind is OutputKind.GRADIENT:
                missing.discard(f"{SO_FAR}{line.sink.target}")
            found += [
                f"{line.value or f'sink of {line.node}'} reads {name} before all parts are added"
                for name in line.inputs
                if name in missing
            ]
        return found


def as_captured(graph: Graph, name: str, known: Instruction | None = None) -> Instruction:
    """Return the instruction of this node; return ``known`` itself if it is equal."""
    node = graph.by_name[name]
    found = known and (known.node, known.inputs, known.phase)
    if known is not None and found == (name, node.inputs, node.phase):
        return known
    return Instruction(node=name, value=name, inputs=node.inputs, phase=node.phase)


def _awaited(node: Node, instruction: Instruction) -> str:
    """Return the value that this wait completes; it may be a recomputed one."""
    return instruction.inputs[node.inputs.index(node.waits_for)]


def order_of(graph: Graph) -> list[str]:
    """Return the nodes that some output needs, in graph order."""
    needed = {output.node for output in graph.outputs}
    for node in reversed(graph.nodes):
        # A node that changes its argument has an effect even if nothing reads it. Random nodes
        # stay, so that the generator advances exactly as in eager PyTorch.
        if node.name in needed or node.mutates or node.is_random:
            needed.add(node.name)
            needed.update(node.inputs)
    return [n.name for n in graph.nodes if n.name in needed and not n.is_input]


def _last_reads(graph: Graph, instructions: Sequence[Instruction]) -> dict[int, int]:
    """Return the last instruction that reads each storage."""
    last_reads: dict[int, int] = {}
    for index, instruction in enumerate(instructions):
        for name in instruction.inputs:
            if name in graph.by_name:
                last_reads.update(dict.fromkeys(graph.storages_of(name), index))
    return last_reads
