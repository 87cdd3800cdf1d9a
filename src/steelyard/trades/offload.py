"""Offload: send a forward value to farther memory after it is made, fetch it for the backward pass.

vDNN's trade (Rhu et al., MICRO 2016), as exchanges of a rank with itself: one call sends, one lets
the near copy go, one begins to fetch, one hands the value over. Struck last, so that lags and leads
count the operators that really run. Not for which values, nor when: see search/.
"""

from collections.abc import Mapping, Sequence
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
from steelyard.core.waiting import Late, first_late, first_wanted, waiting


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
        offers = offers_of(self.name, graph, waiting(program))
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
            chosen.keys() - waiting(program, least_bytes=1)
        )
        if never:
            node = program.graph.by_name[never[0]]
            why = "is computed again" if never[0] in made_again else "cannot be sent off"
            why = "is kept in 8 bits" if never[0] in program.coded else why
            raise Mismatch(
                f"offload rule for {node.op} in {node.path or 'the top level'}, which {why}",
                expected="rules for values that the backward pass reads, once each",
                remedy="take the rule out of the plan, or plan again",
            )
        return with_transfers(program, {n: (r.lag, r.lead) for n, r in chosen.items()})


def with_transfers(program: Program, chosen: Mapping[str, tuple[int, int]]) -> Program:
    """The program that sends these values off and reads what it fetches in their place.

    Each with its lag and its lead: so many operators run between sending and letting go, and
    between beginning to fetch and reading. A value that nothing reads late stays as it is.
    """
    graph = program.graph
    lines = [i for i in program.instructions if i.sink is None]
    first = first_late(lines)
    wanted = first_wanted(graph, lines, chosen)
    in_order = sorted(wanted, key=lambda name: (wanted[name], name))
    transfers = {name: Transfer.of(graph, name, slot) for slot, name in enumerate(in_order)}
    placed = _Gaps(graph, lines)
    for name, transfer in transfers.items():
        lag, lead = chosen[name]
        made = next(k for k, i in enumerate(lines) if i.value == name)
        placed.put(transfer, made=made, wanted=wanted[name], lag=lag, lead=lead)
    late = Late(graph, {name: transfer.fetched.name for name, transfer in transfers.items()})
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
    _handing_over: dict[int, list[Instruction]] = field(default_factory=dict)
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
        handed = _line(transfer.fetched, Phase.BACKWARD)
        self._handing_over.setdefault(wanted, []).append(handed)

    def behind(self, number: int) -> list[Instruction]:
        return self._behind.get(number, [])

    def before(self, number: int) -> list[Instruction]:
        given = (self._letting_go, self._fetching, self._handing_over)
        return [line for lines in given for line in lines.get(number, [])]


def _line(node: Node, phase: Phase) -> Instruction:
    return Instruction(node=node.name, value=node.name, inputs=node.inputs, phase=phase)
