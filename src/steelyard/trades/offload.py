"""Offload: send a forward value to farther memory after it is made, fetch it for the backward pass.

vDNN's trade (Rhu et al., MICRO 2016), as exchanges of a rank with itself: one call sends, one lets
the near copy go, one begins to fetch, one hands the value over. Struck last, so that lags and leads
count the operators that really run. Not for which values, nor when: see search/.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from steelyard.core.cluster import FAR_IN, FAR_OUT
from steelyard.core.collective import Collective, Exchange
from steelyard.core.errors import Mismatch
from steelyard.core.graph import FAR_CALLS, Graph, Node, Phase, Ref, Tensor
from steelyard.core.offers import offers_of
from steelyard.core.program import Instruction, Program
from steelyard.core.rules import Rule, rule_of
from steelyard.core.trade import Offer, Refusal, Source

# Smaller values cost as many calls and buy nothing.
_LEAST_BYTES = 1024


class Offload:
    """Pays communication with far memory, buys memory; what comes back are the same bits."""

    name: ClassVar[str] = "offload"
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = True

    def offers(
        self,
        program: Program,
        source: Source,  # noqa: ARG002 - other trades ask it
    ) -> tuple[tuple[Offer, ...], tuple[Refusal, ...]]:
        graph = program.graph
        offers = offers_of(self.name, graph, movable(program))
        reason = "no value of the forward pass is large, whole and read by the backward pass"
        if graph.decomposition.startswith("inductor"):
            reason = "Inductor compiles each pass as one, and would begin it with what comes back"
        elif offers:
            return offers, ()
        return (), (Refusal(trade=self.name, label="everything", reason=reason),)

    def rewrite(
        self,
        program: Program,
        rules: Sequence[Rule],
        source: Source,  # noqa: ARG002 - other trades ask it
    ) -> Program:
        if not rules:
            return program
        chosen = rule_of(program.graph, rules)
        if len(chosen) < sum(rule.count for rule in rules):
            raise Mismatch(
                "two offload rules name the same value",
                expected="each value in one rule: it is sent off once",
                remedy="take one of them out of the plan, or plan again",
            )
        made_again = {i.node for i in program.again}
        never = [name for name in chosen if name in made_again] or sorted(
            # A smaller batch may make them smaller than is worth it; they go all the same.
            chosen.keys() - movable(program, least_bytes=1)
        )
        if never:
            node = program.graph.by_name[never[0]]
            why = "is computed again" if never[0] in made_again else "cannot be sent off"
            raise Mismatch(
                f"offload rule for {node.op} in {node.path or 'the top level'}, which {why}",
                expected="rules for values that the backward pass reads, once each",
                remedy="take the rule out of the plan, or plan again",
            )
        return with_transfers(program, {n: (r.lag, r.lead) for n, r in chosen.items()})


def movable(program: Program, *, least_bytes: int = _LEAST_BYTES) -> frozenset[str]:
    """The forward values that could leave: large, whole on a storage that they alone describe, and
    read (or what is read by a copy's maker) after the forward pass."""
    graph = program.graph
    leaving = {s for o in graph.outputs for s in graph.storages_of(o.node)}
    makers: dict[int, set[str]] = {}
    for node in graph.nodes:
        if not graph.is_look(node):
            for storage in graph.storages_of(node.name):
                makers.setdefault(storage, set()).add(node.name)
    useful = graph.reaching_backward & {i.value for i in program.instructions}
    found = set()
    for node in graph.forward():
        if node.name not in useful or len(node.outputs) != 1 or graph.is_look(node):
            continue
        (tensor,) = node.outputs
        maker = graph.by_name[node.inputs[0]] if node.is_getitem else node
        own = {node.name, maker.name} if node.is_getitem else {node.name}
        if (
            tensor.storage not in leaving | graph.written
            and makers[tensor.storage] <= own
            and maker.collective is None
            and not maker.waits_for
            and not maker.mutates
            and _fills(tensor, graph.storages[tensor.storage].nbytes)
            and tensor.nbytes >= least_bytes
            and not (len(own) == 1 and graph.has_several(node.name))
        ):
            found.add(node.name)
    return frozenset(found)


def _fills(tensor: Tensor, nbytes: int) -> bool:
    """Whether it is all that lies on its storage, in whatever order."""
    return not tensor.pending and tensor.offset == 0 and tensor.nbytes == nbytes > 0


def with_transfers(program: Program, chosen: Mapping[str, tuple[int, int]]) -> Program:
    """The program that sends these values off and reads what it fetches in their place.

    Each with its lag and its lead: so many operators run between sending and letting go, and
    between beginning to fetch and reading. A value that nothing reads late stays as it is.
    """
    graph = program.graph
    lines = [i for i in program.instructions if i.sink is None]
    first = next((k for k, i in enumerate(lines) if i.phase is Phase.BACKWARD), len(lines))
    wanted = _first_wanted(graph, lines, first, chosen)
    in_order = sorted(wanted, key=lambda name: (wanted[name], name))
    transfers = {name: Transfer.of(graph, name, slot) for slot, name in enumerate(in_order)}
    placed = _Gaps(graph, lines)
    for name, transfer in transfers.items():
        lag, lead = chosen[name]
        made = next(k for k, i in enumerate(lines) if i.value == name)
        placed.put(transfer, made=made, wanted=wanted[name], lag=lag, lead=lead)
    late = _Late(graph, transfers)
    ordered: list[Instruction] = []
    for number, line in enumerate(lines):
        ordered += placed.before(number)
        ordered += late.rewritten(line) if number >= first else [line]
        ordered += placed.behind(number)
    nodes = [node for transfer in transfers.values() for node in transfer.nodes]
    moved = replace(graph, nodes=(*graph.nodes, *nodes))
    result = Program.of(moved, ordered, repeats=program.repeats, update=program.update)
    assert not result.problems(), result.problems()
    return result


def _first_wanted(
    graph: Graph, lines: Sequence[Instruction], first: int, chosen: Iterable[str]
) -> dict[str, int]:
    """The late line that first reads each value, or looks at it."""
    of = _looked_at(graph, frozenset(chosen))
    wanted: dict[str, int] = {}
    for number in range(first, len(lines)):
        for name in lines[number].inputs:
            for value in of.get(name, ()):
                wanted.setdefault(value, number)
    return wanted


def _looked_at(graph: Graph, chosen: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Forward names, and the chosen values that they are or look at."""
    of: dict[str, tuple[str, ...]] = {name: (name,) for name in chosen}
    for node in graph.forward():
        if node.name not in of and graph.is_look(node):
            values = tuple(dict.fromkeys(v for i in node.inputs for v in of.get(i, ())))
            if values:
                of[node.name] = values
    return of


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The four calls by which a value goes and comes back."""

    value: str
    send: Node
    sent: Node
    fetch: Node
    fetched: Node

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.send, self.sent, self.fetch, self.fetched)

    @classmethod
    def of(cls, graph: Graph, value: str, slot: int) -> "Transfer":
        node = graph.by_name[value]
        (tensor,) = node.outputs
        names = {what: f"{value}.{what}" for what in ("send", "sent", "fetch", "fetched")}

        def call(what: str, *inputs: str, outputs: tuple[Tensor, ...] = ()) -> Node:
            # Not of the forward pass: whatever names or counts that sees the step as captured.
            return Node(
                name=names[what],
                op=f"{FAR_CALLS}{what}",
                args=(slot, *(Ref(i) for i in inputs)),
                inputs=inputs,
                outputs=outputs,
                phase=Phase.BACKWARD,
                path=node.path,
                line=node.line,
                signature=f"{FAR_CALLS}{what}",
            )

        def over(axis: str, kind: Exchange) -> Collective:
            return Collective(kind=kind, axis=axis, num_ranks=1, sent_bytes=tensor.nbytes, hops=1)

        send, sent = call("send", value), call("sent", names["send"], value)
        fetch = call("fetch", names["sent"], outputs=node.outputs)
        fetched = call("fetched", names["fetch"], outputs=node.outputs)
        return cls(
            value=value,
            send=replace(send, collective=over(FAR_OUT, Exchange.SEND)),
            sent=replace(sent, waits_for=names["send"]),
            fetch=replace(fetch, collective=over(FAR_IN, Exchange.FETCH)),
            fetched=replace(fetched, waits_for=names["fetch"]),
        )


@dataclass(slots=True)
class _Gaps:
    """Where sending and fetching go between the lines, counted in operators that run."""

    graph: Graph
    lines: Sequence[Instruction]
    _behind: dict[int, list[Instruction]] = field(default_factory=dict)
    _letting_go: dict[int, list[Instruction]] = field(default_factory=dict)
    _fetching: dict[int, list[Instruction]] = field(default_factory=dict)
    _running: list[int] = field(default_factory=list)
    _so_far: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """``_running`` are the lines that run an operator, ``_so_far`` how many before each."""
        for number, line in enumerate(self.lines):
            self._so_far.append(len(self._running))
            if not self.graph.by_name[line.node].is_free:
                self._running.append(number)

    def put(self, transfer: Transfer, *, made: int, wanted: int, lag: int, lead: int) -> None:
        before_it = self._so_far[made + 1]
        before_reader = self._so_far[wanted]
        fetch = max(before_it, before_reader - lead)
        sent = min(before_it + lag, fetch)
        self._behind.setdefault(made, []).append(_line(transfer.send, self.lines[made].phase))
        for counted, node, where in (
            (sent, transfer.sent, self._letting_go),
            (fetch, transfer.fetch, self._fetching),
        ):
            place = wanted if counted == before_reader else self._running[counted]
            where.setdefault(place, []).append(_line(node, self.lines[place].phase))

    def behind(self, number: int) -> list[Instruction]:
        return self._behind.get(number, [])

    def before(self, number: int) -> list[Instruction]:
        return self._letting_go.get(number, []) + self._fetching.get(number, [])


def _line(node: Node, phase: Phase) -> Instruction:
    return Instruction(node=node.name, value=node.name, inputs=node.inputs, phase=phase)


class _Late:
    """Lines of the backward pass, reading what was fetched, and looking at it anew."""

    def __init__(self, graph: Graph, transfers: Mapping[str, Transfer]) -> None:
        self._graph = graph
        self._transfers = transfers
        self._of = _looked_at(graph, frozenset(transfers))
        self._renamed: dict[str, str] = {}

    def rewritten(self, line: Instruction) -> list[Instruction]:
        added: list[Instruction] = []
        for name in line.inputs:
            if name in self._of:
                self._have(name, added)
        inputs = tuple(self._renamed.get(i, i) for i in line.inputs)
        return [*added, replace(line, inputs=inputs)]

    def _have(self, name: str, added: list[Instruction]) -> None:
        if name in self._renamed:
            return
        transfer = self._transfers.get(name)
        if transfer is not None:
            added.append(_line(transfer.fetched, Phase.BACKWARD))
            self._renamed[name] = transfer.fetched.name
            return
        node = self._graph.by_name[name]
        for read in node.inputs:
            if read in self._of:
                self._have(read, added)
        self._renamed[name] = f"{name}.back"
        inputs = tuple(self._renamed.get(i, i) for i in node.inputs)
        added.append(
            Instruction(node=name, value=f"{name}.back", inputs=inputs, phase=Phase.BACKWARD)
        )
