"""Offload: send a forward value to offload memory after it is made, fetch it for the backward pass.

vDNN's trade (Rhu et al., MICRO 2016), as exchanges of a rank with itself: one call sends, one lets
the near copy go, one begins to fetch, one hands the value over. Struck last, so that lags and leads
count the operators that really run. Not for which values, nor when: see search/.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, ClassVar

from pydantic import Field

from steelyard.errors import Mismatch
from steelyard.hardware.cluster import FAR_IN, FAR_OUT
from steelyard.ir.collective import Collective, Exchange
from steelyard.ir.graph import FAR_CALLS, Graph, Node, Phase, Ref, Tensor
from steelyard.ir.program import Instruction, Program
from steelyard.ir.rule import Rule, rule_of, to_rules
from steelyard.ir.saved_activations import Late, first_late, first_wanted, saved_for_backward
from steelyard.ir.step_source import StepSource
from steelyard.passes.offload.sliced_activation_matmuls import (
    Read,
    sliceable_inputs,
    with_inputs_in_slices,
)
from steelyard.passes.offload.transfer_nodes import rows_in_slice
from steelyard.plans.offers import offers_of
from steelyard.plans.rule_table import OMITTED, CallTable, RuleTable, Whole
from steelyard.plans.trade import Offer, Rejection

# Of a value that may come back in slices. Two slices are near, so that of few nothing is gained; of
# many, each is a transfer of its own and a product of few rows.
_LEAST_SLICED_BYTES, _SLICE_BYTES = 1 << 20, 2 << 20
_FEWEST_SLICES, _MOST_SLICES = 4, 64


class OffloadTable(CallTable):
    """``[[offload]]``: a value, in how many slices it is fetched, and how many operators run while
    it is sent (``lag``) and fetched (``lead``)."""

    degree: Annotated[Whole, Field(alias="slices"), OMITTED] = 0
    lag: Whole = 0
    lead: Whole = 0


class Offload:
    """Pays communication with offload memory, buys memory; what comes back are the same bits.

    Of a value that comes back in slices the products that read it are added up in another order.
    """

    name: ClassVar[str] = "offload"
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    table: ClassVar[type[RuleTable]] = OffloadTable

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - other trades ask it
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        graph = program.graph
        offers = offers_of(self.name, graph, saved_for_backward(program))
        reason = "no value of the forward pass is large, whole and read by the backward pass"
        if graph.decomposition.startswith("inductor"):
            reason = "Inductor compiles each pass as one, and would begin it with what comes back"
        elif offers:
            return (*offers, *_offers_in_slices(program)), ()
        return (), (Rejection(trade=self.name, label="everything", reason=reason),)

    def rewrite(
        self,
        program: Program,
        rules: Sequence[Rule],
        source: StepSource,
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
            chosen.keys() - saved_for_backward(program, least_bytes=1)
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
        slices = {name: rule.degree for name, rule in chosen.items() if rule.degree > 1}
        whole = sorted(slices.keys() - sliceable_inputs(program, slices).keys())
        if whole:
            node, count = program.graph.by_name[whole[0]], slices[whole[0]]
            raise Mismatch(
                f"offload rule for {node.op} in {node.path or 'the top level'} asks for {count} "
                "slices, and it comes back whole",
                expected="slices of a value whose rows lie one behind the other, and that nothing "
                "in the backward pass reads but products that are sums over them",
                remedy="set slices of that rule to 0, or plan again",
            )
        program = with_transfers(program, {n: (r.lag, r.lead) for n, r in chosen.items()}, slices)
        if slices:
            # So that what the new calls cost is known.
            source.rewritten(program.graph)
        return program


def _offers_in_slices(program: Program) -> Iterator[Offer]:
    """One for each value that may be, those of equal blocks together."""
    graph = program.graph
    large = saved_for_backward(program, least_bytes=_LEAST_SLICED_BYTES)
    by_count: dict[int, list[str]] = {}
    for value, products in sliceable_inputs(program, large).items():
        if count := _slices(products[0].matrix):
            by_count.setdefault(count, []).append(value)
    for count, values in sorted(by_count.items()):
        for rule in to_rules(graph, values, trade="offload", lead=1, degree=count):
            label = f"{rule.module or 'top level'}: {rule.op} ({rule.count}), in {count} slices"
            yield Offer(trade="offload", label=label, rules=(rule,))


def _slices(matrix: Tensor) -> int:
    """Into how many it is taken apart; 0 where two of them are no less than most of it."""
    count = min(max(_FEWEST_SLICES, matrix.nbytes // _SLICE_BYTES), _MOST_SLICES)
    return count if 3 * rows_in_slice(matrix, count) <= matrix.shape[0] else 0


def with_transfers(
    program: Program,
    chosen: Mapping[str, tuple[int, int]],
    slices: Mapping[str, int] = MappingProxyType({}),
) -> Program:
    """The program that sends these values off and reads what it fetches in their place.

    Each with its lag and its lead: so many operators run between sending and letting go, and
    between beginning to fetch and reading. A value that nothing reads late stays as it is. Those
    with ``slices`` come back in so many.
    """
    plain = [i for i in program.instructions if i.sink is None]
    wanted = first_wanted(program.graph, plain, chosen)
    in_order = sorted(wanted, key=lambda name: (wanted[name], name))
    slots = {name: slot for slot, name in enumerate(in_order)}
    parted = {name: slices[name] for name in in_order if name in slices}
    found = with_inputs_in_slices(program, parted, slots)
    graph, lines = found.graph, found.lines
    first = first_late(lines)
    wanted = first_wanted(graph, lines, wanted.keys() - parted.keys())
    transfers = []
    placed = _Gaps(graph, lines)
    for name, slot in slots.items():
        calls = _Calls(graph, name, slot)
        if name in parted:
            transfer = calls.in_slices(found.reads[name])
        else:
            transfer = calls.whole(wanted[name])
        transfers.append(transfer)
        lag, lead = chosen[name]
        made = next(k for k, i in enumerate(lines) if i.value == name)
        placed.put(transfer, made=made, lag=lag, lead=lead)
    late = Late(graph, {name: f"{name}.fetched" for name in wanted})
    ordered: list[Instruction] = []
    for number, line in enumerate(lines):
        ordered += placed.before(number)
        ordered += late.rewritten(line) if number >= first else [line]
        ordered += placed.behind(number)
    nodes = [node for transfer in transfers for node in transfer.nodes]
    moved = replace(graph, nodes=(*graph.nodes, *nodes))
    result = program.with_lines(ordered, on=moved)
    assert not result.problems(), result.problems()
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Back:
    """Fetched for the line ``wanted``: the call that begins it, and the one that ends it, which
    hands the value over, or lets the last slices go ``behind`` that line."""

    begin: Node
    end: Node
    wanted: int
    behind: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The calls by which a value goes and comes back: once, or in slices for each that reads it."""

    send: Node
    sent: Node
    back: tuple[Back, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.send, self.sent, *(n for b in self.back for n in (b.begin, b.end)))


class _Calls:
    """The calls of one value, whose place in offload memory is ``slot``."""

    def __init__(self, graph: Graph, value: str, slot: int) -> None:
        self._node = graph.by_name[value]
        self._value = value
        self._slot = slot
        (self._tensor,) = self._node.outputs
        send, sent = self._call("send", value), self._call("sent", f"{value}.send", value)
        self._send = replace(send, collective=self._over(FAR_OUT, Exchange.SEND))
        self._sent = replace(sent, waits_for=send.name)

    def whole(self, wanted: int) -> Transfer:
        fetch = self._call("fetch", self._sent.name, outputs=(self._tensor,))
        fetched = self._call("fetched", fetch.name, outputs=(self._tensor,))
        back = Back(
            begin=replace(fetch, collective=self._over(FAR_IN, Exchange.FETCH)),
            end=replace(fetched, waits_for=fetch.name),
            wanted=wanted,
        )
        return Transfer(send=self._send, sent=self._sent, back=(back,))

    def in_slices(self, reads: Sequence[Read]) -> Transfer:
        back = []
        for number, read in enumerate(reads):
            copy = f"@{number}" if number else ""
            begin = self._call("begin", self._sent.name, outputs=(read.room,), copy=copy)
            begin = replace(
                begin,
                args=(*begin.args, read.count, *read.matrix.shape),
                collective=read.link,
            )
            # It reads the product too, and so stays behind it.
            end = self._call("end", begin.name, read.call.name, copy=copy)
            end = replace(end, waits_for=begin.name)
            back.append(Back(begin=begin, end=end, wanted=read.line, behind=True))
        return Transfer(send=self._send, sent=self._sent, back=tuple(back))

    def _call(
        self, what: str, *inputs: str, outputs: tuple[Tensor, ...] = (), copy: str = ""
    ) -> Node:
        # Not of the forward pass: whatever names or counts that sees the step as captured.
        return Node(
            name=f"{self._value}.{what}{copy}",
            op=f"{FAR_CALLS}{what}",
            args=(self._slot, *(Ref(i) for i in inputs)),
            inputs=inputs,
            outputs=outputs,
            phase=Phase.BACKWARD,
            path=self._node.path,
            line=self._node.line,
            signature=f"{FAR_CALLS}{what}",
        )

    def _over(self, axis: str, kind: Exchange) -> Collective:
        nbytes = self._tensor.nbytes
        return Collective(kind=kind, axis=axis, num_ranks=1, sent_bytes=nbytes, hops=1)


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

    def put(self, transfer: Transfer, *, made: int, lag: int, lead: int) -> None:
        before_it = self._so_far[made + 1]
        fetches = [max(before_it, self._so_far[back.wanted] - lead) for back in transfer.back]
        wanted = transfer.back[0].wanted
        self._behind.setdefault(made, []).append(_line(transfer.send, self.lines[made].phase))
        self._put(self._letting_go, transfer.sent, min(before_it + lag, fetches[0]), wanted)
        for back, fetch in zip(transfer.back, fetches, strict=True):
            self._put(self._fetching, back.begin, fetch, back.wanted)
            where = self._behind if back.behind else self._handing_over
            where.setdefault(back.wanted, []).append(_line(back.end, Phase.BACKWARD))

    def _put(
        self, where: dict[int, list[Instruction]], node: Node, counted: int, wanted: int
    ) -> None:
        """Before so many operators have run, and before the line that wants it."""
        place = wanted if counted == self._so_far[wanted] else self._running[counted]
        where.setdefault(place, []).append(_line(node, self.lines[place].phase))

    def behind(self, number: int) -> list[Instruction]:
        return self._behind.get(number, [])

    def before(self, number: int) -> list[Instruction]:
        given = (self._letting_go, self._fetching, self._handing_over)
        return [line for lines in given for line in lines.get(number, [])]


def _line(node: Node, phase: Phase) -> Instruction:
    return Instruction(node=node.name, value=node.name, inputs=node.inputs, phase=phase)
