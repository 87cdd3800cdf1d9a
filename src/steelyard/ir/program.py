"""The step as it will be executed, line by line: what predict/ counts and run/ carries out.

A program holds every decision; whoever enacts it takes none. Not for choosing: see search/.
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

# How inputs of the last micro-batch begin that those before it have added up: the gradient of a
# parameter, and the loss.
SO_FAR = "so far:"
LOSS_SO_FAR = f"{SO_FAR}loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """Compute ``node`` from ``inputs`` and call the result ``value``.

    ``value`` is the node's own name, or another one where the node is computed again.
    With ``sink`` nothing is computed: the one input leaves the program (a gradient is added to
    its parameter's, a buffer takes its new value).
    """

    node: str
    value: str
    inputs: tuple[str, ...]
    phase: Phase
    sink: Output | None = None

    @property
    def is_again(self) -> bool:
        return self.sink is None and self.value != self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class Underway:
    """An exchange, between the line that issues it and the one that waits for it, if one does."""

    issue: int
    wait: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """How a program's micro-batches go through stages: who holds which, and works when.

    ``updates`` are the optimizer's steps of the ranks, each on what its stages hold. ``is_pinned``:
    messages go through memory that the ranks share; ``is_by_host``: those that do not wait on the
    ranks' hosts, whose memory is not what the step lies in.
    """

    schedule: str
    stages: PipelineStages
    order: Order
    updates: tuple["Program", ...] = ()
    is_pinned: bool = False
    is_by_host: bool = False

    def held(self, rank: int) -> frozenset[str]:
        """The model's tensors that stages of this rank read or give a gradient to."""
        rank_of = self.order.rank_of
        own = (s for s in self.stages.stages if rank_of[s.index] == rank)
        return frozenset(name for stage in own for name in stage.held)

    def trained(self, rank: int) -> tuple[str, ...]:
        """The parameters that this rank has gradients of; of what several ranks hold, all have."""
        rank_of = self.order.rank_of
        own = [stage for stage in self.stages.stages if rank_of[stage.index] == rank]
        shared = (name for name, where in self.stages.shared if any(s.index in where for s in own))
        return tuple(dict.fromkeys((*(n for stage in own for n in stage.trained), *shared)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """Straight-line code over a graph; run ``repeats`` times per step, on equal micro-batches, the
    last time to the end and before that as ``earlier``.

    With a ``layout`` it is that of ``rank``; those of ranks that work on as many samples are alike,
    and of ranks that work on more or fewer may stand beside it as ``sibling_programs``, one of each
    number. ``before`` is what micro-batches before the last carry out, where the lines do not tell.
    ``partings`` say which of the model's tensors it holds a part of, or a part of a part.
    ``update`` is the optimizer's step, which follows; ``loss`` is empty in an update, and
    ``undivided`` says why it cannot be carried out one parameter at a time, if it cannot, ``uncut``
    of which parameters it cannot be some rows at a time, and why, and ``unparted`` why it would be
    another on parts of parameters. With a ``pipeline``, each rank carries out its stages of it, and
    the lines are those of all.
    """

    graph: Graph
    instructions: tuple[Instruction, ...]
    loss: str = ""
    repeats: int = 1
    layout: ParallelLayout = ALONE
    rank: int = 0
    sibling_programs: tuple["Program", ...] = ()
    before: "Program | None" = None
    partings: tuple[ShardingChoice, ...] = ()
    pipeline: Pipeline | None = None
    update: "Program | None" = None
    undivided: str = ""
    unparted: str = ""
    uncut: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def plain(cls, graph: Graph, *, update: "Program | None" = None, rank: int = 0) -> Self:
        """The graph as captured: everything the backward pass needs is kept."""
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
        """Add to ``computed`` each output's departure, as early as nothing reads it later."""
        instructions = list(computed)
        last_read: dict[str, int] = {}
        for index, instruction in enumerate(instructions):
            last_read[instruction.value] = index
            for name in instruction.inputs:
                last_read[name] = index
        inputs = {node.name: node for node in graph.inputs()}
        is_overwriting = any(output.kind is OutputKind.UPDATE for output in graph.outputs)
        lying = _last_reads(graph, instructions) if is_overwriting else {}
        departures: dict[int, list[Instruction]] = {}
        for output in graph.outputs:
            if output.kind is OutputKind.LOSS:
                continue
            index = last_read.get(output.node, -1)
            if output.kind is OutputKind.UPDATE:
                # The old value must not be overwritten while something still reads it.
                old = {t.storage for t in inputs[output.target].outputs}
                index = max(index, *(lying.get(storage, -1) for storage in old))
            sink = Instruction(
                node=output.node,
                value="",
                inputs=(output.node,),
                phase=instructions[index].phase if index >= 0 else Phase.FORWARD,
                sink=output,
            )
            departures.setdefault(index, []).append(sink)
        placed = list(departures.get(-1, []))
        for index, instruction in enumerate(instructions):
            placed.append(instruction)
            placed += departures.get(index, [])
        # A stage of a pipeline may have none.
        loss = next((o.node for o in graph.outputs if o.kind is OutputKind.LOSS), "")
        return cls(graph=graph, instructions=tuple(placed), loss=loss, update=update)

    def with_lines(self, computed: Iterable[Instruction], *, on: Graph) -> "Program":
        """The same step by other lines, over ``on``."""
        made = Program.of(on, computed)
        return replace(self, graph=on, instructions=made.instructions, loss=made.loss)

    def with_graph(self, graph: Graph) -> "Program":
        """The same step over another graph, as that was captured."""
        known = {line.value: line for line in self.instructions if line.sink is None}
        return self.with_lines(
            (as_captured(graph, name, known.get(name)) for name in order_of(graph)), on=graph
        )

    def as_graph(self) -> Graph:
        """A graph whose nodes are the lines: what is computed again stands there again."""
        graph, storages = self.graph, list(self.graph.storages)
        nodes = list(graph.inputs())
        on = {node.name: {t.storage: t.storage for t in node.outputs} for node in nodes}
        made: set[int] = set()
        for line in self.instructions:
            if line.sink is not None:
                continue
            node = graph.by_name[line.node]
            lies = {old: new for name in line.inputs for old, new in on[name].items()}
            for storage in graph.storages_of(line.node):
                if storage in made and storage not in lies:
                    lies[storage] = len(storages)
                    storages.append(storages[storage])
                lies.setdefault(storage, storage)
                made.add(storage)
            on[line.value] = {s: lies[s] for s in graph.storages_of(line.node)}
            reading = node.reading(dict(zip(node.inputs, line.inputs)))
            outputs = tuple(replace(t, storage=lies[t.storage]) for t in node.outputs)
            nodes.append(replace(reading, name=line.value, outputs=outputs, phase=line.phase))
        return replace(graph, nodes=tuple(nodes), storages=tuple(storages))

    def repeated(self, times: int) -> "Program":
        return replace(self, repeats=times)

    @property
    def parts(self) -> int:
        """How many micro-batches there are, over all ranks; equal, where ranks share equally."""
        return self.repeats * self.layout.batch

    @property
    def units(self) -> int:
        """Into how many equal units the global batch is cut, of which a part is ``share``."""
        return self.repeats * self.layout.units

    @property
    def share(self) -> int:
        return self.layout.share_of(self.rank)

    @property
    def batch_bytes(self) -> int:
        """Of the whole global batch, which every rank is given."""
        return self.graph.resident_bytes(Role.BATCH) * self.units // self.share

    @cached_property
    def earlier(self) -> "Program":
        """What micro-batches before the last one carry out: all but what exchanges their sums."""
        if self.before is not None:
            return self.before
        graph = self.graph
        behind = {n.name for n in graph.inputs() if n.name.startswith(SO_FAR)}
        if not behind:
            return self
        own: dict[str, str] = {}
        for node in graph.nodes:
            if behind.intersection(node.inputs):
                if LOSS_SO_FAR in node.inputs:
                    own = {o.node: name for o in graph.outputs if o.kind is OutputKind.LOSS
                           for name in node.inputs if name != LOSS_SO_FAR}  # fmt: skip
                behind.add(node.name)
        kept = (o for o in graph.outputs if o.kind is not OutputKind.SUMMED)
        outputs = tuple(replace(o, node=own.get(o.node, o.node)) for o in kept)
        nodes = tuple(node for node in graph.nodes if node.name not in behind)
        return replace(
            self,
            graph=replace(graph, nodes=nodes, outputs=outputs),
            instructions=tuple(i for i in self.instructions if i.node not in behind),
            loss=own.get(self.loss, self.loss),
        )

    @property
    def passes(self) -> tuple["Program", ...]:
        """One for each micro-batch."""
        return (self.earlier,) * (self.repeats - 1) + (self,)

    @cached_property
    def in_shares(self) -> frozenset[str]:
        """The parameters of which ranks that share the batch hold some rows each."""
        return frozenset(n for p in self.partings if p.axis == DATA for n, _ in p.inputs)

    @cached_property
    def spoken(self) -> tuple[str, ...]:
        """What ranks have to exchange alike: each exchange, and whose gradients come out when."""
        nodes, place = self.graph.by_name, self.graph.position
        issued = (nodes[self.instructions[e.issue].node].collective for e in self.exchanges)
        gradients = (o for o in self.graph.outputs if o.kind is OutputKind.GRADIENT)
        arriving = sorted((place[o.node], o.target) for o in gradients)
        return (*map(str, issued), *(target for _, target in arriving))

    @cached_property
    def again(self) -> tuple[Instruction, ...]:
        """What is computed a second time."""
        return tuple(i for i in self.instructions if i.is_again)

    @cached_property
    def coded(self) -> tuple[str, ...]:
        """The values that wait in 8 bits."""
        nodes = (self.graph.by_name[i.node] for i in self.instructions)
        return tuple(node.inputs[0] for node in nodes if node.op == ENCODE)

    @cached_property
    def sends_codes(self) -> bool:
        """Whether gradients are exchanged in few bits, or as factors."""
        return any(node.op in FIRST_CALLS for node in self.graph.nodes)

    @property
    def is_lossy(self) -> bool:
        return bool(self.coded) or self.sends_codes

    @cached_property
    def flops(self) -> int:
        nodes = self.graph.by_name
        return self.repeats * sum(nodes[i.node].flops for i in self.instructions if i.sink is None)

    @cached_property
    def sent_bytes(self) -> int:
        """What this rank sends to others in a step."""
        return sum(c.sent_bytes for c in self._issued)

    @cached_property
    def wire_bytes(self) -> int:
        """The same with what is said of it."""
        return sum(c.wire_bytes for c in self._issued)

    @cached_property
    def _issued(self) -> tuple[Collective, ...]:
        """All exchanges of a step."""
        once = self.update._issued if self.update is not None else ()
        return once + tuple(c for each in self.passes for c in each._issued_in_a_pass)

    @cached_property
    def _issued_in_a_pass(self) -> tuple[Collective, ...]:
        nodes = self.graph.by_name
        issued = (nodes[self.instructions[e.issue].node].collective for e in self.exchanges)
        return tuple(c for c in issued if c is not None)

    @cached_property
    def far_bytes(self) -> int:
        """Room that is needed in offload memory, in whole pages for each value."""
        slots = [n for name, n in self._far_sizes().items() if not isinstance(name, str)]
        return sum(map(offload_room, (*self.far_rooms.values(), *slots)))

    @cached_property
    def far_rooms(self) -> dict[str, int]:
        """What has a place of its own in offload memory for good, by name, and its bytes."""
        update = {} if self.update is None else self.update.far_rooms
        return update | {k: n for k, n in self._far_sizes().items() if isinstance(k, str)}

    def _far_sizes(self) -> dict[Argument, int]:
        nodes = self.graph.by_name
        moving = (nodes[self.instructions[e.issue].node] for e in self.exchanges)
        return {n.args[0]: n.collective.sent_bytes for n in moving if n.is_far and n.collective}

    @cached_property
    def is_moving(self) -> bool:
        """Whether anything goes to offload memory or comes from there."""
        moves = any(node.is_far for node in self.graph.nodes)
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
        """Why this is no valid program; empty when it is one."""
        have = {node.name for node in self.graph.inputs()}
        found: list[str] = []
        for instruction in self.instructions:
            label = instruction.value or f"sink of {instruction.node}"
            found += [
                f"{label} reads {i} before it exists" for i in instruction.inputs if i not in have
            ]
            if instruction.sink is None:
                if instruction.value in have:
                    found.append(f"{instruction.value} is computed twice under one name")
                have.add(instruction.value)
        if self.loss and self.loss not in have:
            found.append("the loss is never computed")
        return found + self._read_early()

    def _read_early(self) -> list[str]:
        """Results that are read, or lost, before they have arrived."""
        found = []
        for exchange in self.exchanges:
            value = self.instructions[exchange.issue].value
            if exchange.wait is None:
                found.append(f"nothing waits for {value}")
            found += [
                f"{i.value or f'sink of {i.node}'} reads {value} while it is on its way"
                for index, i in enumerate(self.instructions)
                if value in i.inputs and index != exchange.wait
            ]
        return found + self._summed_early()

    def _summed_early(self) -> list[str]:
        """Sums that are read before this micro-batch has added its part."""
        missing = {n.name for n in self.graph.inputs() if n.name.startswith(SO_FAR)} - {LOSS_SO_FAR}
        found = []
        for line in self.instructions:
            if line.sink is not None and line.sink.kind is OutputKind.GRADIENT:
                missing.discard(f"{SO_FAR}{line.sink.target}")
            found += [
                f"{line.value or f'sink of {line.node}'} reads {name} before all is added"
                for name in line.inputs
                if name in missing
            ]
        return found


def as_captured(graph: Graph, name: str, known: Instruction | None = None) -> Instruction:
    """The line of this node; ``known``, where that is the same."""
    node = graph.by_name[name]
    found = known and (known.node, known.inputs, known.phase)
    if known is not None and found == (name, node.inputs, node.phase):
        return known
    return Instruction(node=name, value=name, inputs=node.inputs, phase=node.phase)


def _awaited(node: Node, instruction: Instruction) -> str:
    """The value, perhaps a copy, that this wait hands over."""
    return instruction.inputs[node.inputs.index(node.waits_for)]


def order_of(graph: Graph) -> list[str]:
    """The nodes that some output needs, in graph order."""
    needed = {output.node for output in graph.outputs}
    for node in reversed(graph.nodes):
        # A node that writes into its argument acts without being read; random ones are kept so
        # that the generator moves on exactly as in eager PyTorch.
        if node.name in needed or node.mutates or node.is_random:
            needed.add(node.name)
            needed.update(node.inputs)
    return [n.name for n in graph.nodes if n.name in needed and not n.is_input]


def _last_reads(graph: Graph, instructions: Sequence[Instruction]) -> dict[int, int]:
    """Of each storage, the last line that reads something which lies there."""
    found: dict[int, int] = {}
    for index, instruction in enumerate(instructions):
        for name in instruction.inputs:
            if name in graph.by_name:
                found.update(dict.fromkeys(graph.storages_of(name), index))
    return found
