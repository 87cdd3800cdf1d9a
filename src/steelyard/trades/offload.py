"""Offload: send a forward value to offload memory and fetch it for the backward pass.

This is vDNN's idea (Rhu et al., MICRO 2016), modelled as collectives of a single rank. Each value
has four calls: start the send, free the device copy, start the fetch, return the fetched value. The
trade is applied last, so that lag and lead count the operators that really run. Not for choosing
values, lag and lead: see search/.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

from steelyard.errors import Mismatch
from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT
from steelyard.ir.collective import Collective, Exchange
from steelyard.ir.graph import OFFLOAD_CALLS, Graph, Node, Phase, Ref, Tensor
from steelyard.ir.program import Instruction, Program
from steelyard.ir.rule import Rule, rule_of, to_rules
from steelyard.ir.rule_kinds import ValueOffload
from steelyard.ir.saved_activations import (
    BackwardRewriter,
    first_backward_line,
    first_backward_reader,
    saved_for_backward,
)
from steelyard.ir.step_source import StepSource
from steelyard.passes.offload.sliced_activation_matmuls import (
    Read,
    sliceable_inputs,
    with_inputs_in_slices,
)
from steelyard.passes.offload.transfer_nodes import rows_in_slice
from steelyard.plans.offers import offers_of
from steelyard.plans.trade import Offer, Rejection

# Limits for fetching a value in slices. Two slices are resident at a time, so very few slices save
# nothing. With many slices, each is a separate transfer and a product with few rows.
_LEAST_SLICED_BYTES, _SLICE_BYTES = 1 << 20, 2 << 20
_FEWEST_SLICES, _MOST_SLICES = 4, 64


@dataclass(frozen=True, kw_only=True)
class OffloadRule(ValueOffload):
    """``[[offload]]``: an offloaded value, and the slices and timing of its transfers."""

    trade: str = field(init=False, default="offload")


class Offload:
    """Pays communication with offload memory, buys memory; the fetched bits are the saved ones.

    If a value is fetched in slices, the products that read it sum in another order.
    """

    name: ClassVar[str] = OffloadRule.trade
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    rule: ClassVar[type[Rule]] = OffloadRule

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - other trades ask it
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        graph = program.graph
        offers = offers_of(OffloadRule, graph, saved_for_backward(program))
        reason = "no value of the forward pass is large, unsliced and read by the backward pass"
        if graph.decomposition.startswith("inductor"):
            reason = (
                "Inductor compiles each pass as a whole, and would fetch all offloaded values at "
                "its beginning"
            )
        elif offers:
            return (*offers, *_offers_in_slices(program)), ()
        return (), (Rejection(trade=self.name, label="everything", reason=reason),)

    def rewrite(
        self,
        program: Program,
        rules: Sequence[OffloadRule],
        source: StepSource,
    ) -> Program:
        if not rules:
            return program
        chosen = rule_of(program.graph, rules)
        if len(chosen) < sum(rule.count for rule in rules):
            raise Mismatch(
                "two offload rules name the same value",
                expected="each value in one rule, because it is offloaded once",
                remedy="remove one of them from the plan, or plan again",
            )
        recomputed = {i.node for i in program.recomputed}
        impossible = [name for name in chosen if name in recomputed] or sorted(
            # A smaller batch may make values smaller than the size that is worthwhile; they are
            # still offloaded.
            chosen.keys() - saved_for_backward(program, least_bytes=1)
        )
        if impossible:
            node = program.graph.by_name[impossible[0]]
            problem = "is recomputed" if impossible[0] in recomputed else "cannot be offloaded"
            problem = "is kept in 8 bits" if impossible[0] in program.quantized else problem
            raise Mismatch(
                f"offload rule for {node.op} in {node.path or 'the top level'}, which {problem}",
                expected="rules for values that the backward pass reads, once each",
                remedy="remove the rule from the plan, or plan again",
            )
        slices = {name: rule.slices for name, rule in chosen.items() if rule.slices > 1}
        unsliceable = sorted(slices.keys() - sliceable_inputs(program, slices).keys())
        if unsliceable:
            node, count = program.graph.by_name[unsliceable[0]], slices[unsliceable[0]]
            raise Mismatch(
                f"offload rule for {node.op} in {node.path or 'the top level'} asks for {count} "
                "slices, but the value is fetched whole",
                expected="slices of a value with contiguous rows that the backward pass reads "
                "only in products that sum over its rows",
                remedy="set slices of that rule to 0, or plan again",
            )
        program = with_transfers(program, {n: (r.lag, r.lead) for n, r in chosen.items()}, slices)
        if slices:
            # This registers the new graph, so that the costs of its new calls are known.
            source.rewritten(program.graph)
        return program


def _offers_in_slices(program: Program) -> Iterator[Offer]:
    """Yield one offer per sliceable value; values of equal blocks share one."""
    graph = program.graph
    large = saved_for_backward(program, least_bytes=_LEAST_SLICED_BYTES)
    by_count: dict[int, list[str]] = {}
    for value, products in sliceable_inputs(program, large).items():
        if count := _slice_count(products[0].matrix):
            by_count.setdefault(count, []).append(value)
    for count, values in sorted(by_count.items()):
        for rule in to_rules(graph, values, OffloadRule, lead=1, slices=count):
            label = f"{rule.module or 'top level'}: {rule.op} ({rule.count}), in {count} slices"
            yield Offer(trade=rule.trade, label=label, rules=(rule,))


def _slice_count(matrix: Tensor) -> int:
    """Return the number of slices, or 0 if two slices are most of the matrix."""
    count = min(max(_FEWEST_SLICES, matrix.nbytes // _SLICE_BYTES), _MOST_SLICES)
    return count if 3 * rows_in_slice(matrix, count) <= matrix.shape[0] else 0


def with_transfers(
    program: Program,
    chosen: Mapping[str, tuple[int, int]],
    slices: Mapping[str, int] = MappingProxyType({}),
) -> Program:
    """Return the program that offloads these values and reads the fetched values instead.

    ``chosen`` maps each value to its lag and lead: the number of operators between sending and
    freeing it, and between starting the fetch and reading it. A value that the backward pass does
    not read stays. ``slices`` maps some values to the number of slices in which they are fetched.
    """
    plain = [i for i in program.instructions if i.sink is None]
    first_reader = first_backward_reader(program.graph, plain, chosen)
    in_order = sorted(first_reader, key=lambda name: (first_reader[name], name))
    slots = {name: slot for slot, name in enumerate(in_order)}
    sliced = {name: slices[name] for name in in_order if name in slices}
    found = with_inputs_in_slices(program, sliced, slots)
    graph, lines = found.graph, found.lines
    first = first_backward_line(lines)
    first_reader = first_backward_reader(graph, lines, first_reader.keys() - sliced.keys())
    transfers = []
    insertions = _Insertions(graph, lines)
    for name, slot in slots.items():
        calls = _Calls(graph, name, slot)
        if name in sliced:
            transfer = calls.in_slices(found.reads[name])
        else:
            transfer = calls.whole(first_reader[name])
        transfers.append(transfer)
        lag, lead = chosen[name]
        index = next(k for k, i in enumerate(lines) if i.value == name)
        insertions.put(transfer, made=index, lag=lag, lead=lead)
    rewriter = BackwardRewriter(graph, {name: f"{name}.fetched" for name in first_reader})
    ordered: list[Instruction] = []
    for number, line in enumerate(lines):
        ordered += insertions.before(number)
        ordered += rewriter.rewritten(line) if number >= first else [line]
        ordered += insertions.behind(number)
    nodes = [node for transfer in transfers for node in transfer.nodes]
    with_transfer_nodes = replace(graph, nodes=(*graph.nodes, *nodes))
    result = program.with_lines(ordered, on=with_transfer_nodes)
    assert not result.problems(), result.problems()
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """The fetch of a value for the line ``wanted``: the calls that start and end it.

    The end call returns the value or, ``behind`` that line, frees the last slices.
    """

    begin: Node
    end: Node
    wanted: int
    behind: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The transfer calls of one value: a send and a fetch; if sliced, one fetch for each reader."""

    send: Node
    sent: Node
    fetches: tuple[Fetch, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.send, self.sent, *(n for b in self.fetches for n in (b.begin, b.end)))


class _Calls:
    """Builds the transfer calls of one value, whose allocation in offload memory is ``slot``."""

    def __init__(self, graph: Graph, value: str, slot: int) -> None:
        self._node = graph.by_name[value]
        self._value = value
        self._slot = slot
        (self._tensor,) = self._node.outputs
        send, sent = self._call("send", value), self._call("sent", f"{value}.send", value)
        self._send = replace(send, collective=self._collective(OFFLOAD_OUT, Exchange.SEND))
        self._sent = replace(sent, waits_for=send.name)

    def whole(self, wanted: int) -> Transfer:
        fetch = self._call("fetch", self._sent.name, outputs=(self._tensor,))
        fetched = self._call("fetched", fetch.name, outputs=(self._tensor,))
        fetch_whole = Fetch(
            begin=replace(fetch, collective=self._collective(OFFLOAD_IN, Exchange.FETCH)),
            end=replace(fetched, waits_for=fetch.name),
            wanted=wanted,
        )
        return Transfer(send=self._send, sent=self._sent, fetches=(fetch_whole,))

    def in_slices(self, reads: Sequence[Read]) -> Transfer:
        fetches = []
        for number, read in enumerate(reads):
            copy = f"@{number}" if number else ""
            begin = self._call("begin", self._sent.name, outputs=(read.room,), copy=copy)
            begin = replace(
                begin,
                args=(*begin.args, read.count, *read.matrix.shape),
                collective=read.link,
            )
            # The end call also reads the product, so that it runs after the product.
            end = self._call("end", begin.name, read.call.name, copy=copy)
            end = replace(end, waits_for=begin.name)
            fetches.append(Fetch(begin=begin, end=end, wanted=read.line, behind=True))
        return Transfer(send=self._send, sent=self._sent, fetches=tuple(fetches))

    def _call(
        self, call_name: str, *inputs: str, outputs: tuple[Tensor, ...] = (), copy: str = ""
    ) -> Node:
        # Marked as part of the backward pass: code that names or counts forward nodes must see the
        # step as it was captured.
        return Node(
            name=f"{self._value}.{call_name}{copy}",
            op=f"{OFFLOAD_CALLS}{call_name}",
            args=(self._slot, *(Ref(i) for i in inputs)),
            inputs=inputs,
            outputs=outputs,
            phase=Phase.BACKWARD,
            path=self._node.path,
            line=self._node.line,
            signature=f"{OFFLOAD_CALLS}{call_name}",
        )

    def _collective(self, axis: str, kind: Exchange) -> Collective:
        nbytes = self._tensor.nbytes
        return Collective(kind=kind, axis=axis, num_ranks=1, sent_bytes=nbytes, hops=1)


@dataclass(slots=True)
class _Insertions:
    """Positions of the transfer calls between the lines, counted in operators that run."""

    graph: Graph
    lines: Sequence[Instruction]
    _after: dict[int, list[Instruction]] = field(default_factory=dict)
    _frees: dict[int, list[Instruction]] = field(default_factory=dict)
    _fetch_starts: dict[int, list[Instruction]] = field(default_factory=dict)
    _fetch_ends: dict[int, list[Instruction]] = field(default_factory=dict)
    _running: list[int] = field(default_factory=list)
    _ran_before: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """``_running`` lists the lines that run an operator; ``_ran_before`` counts those before
        each line.
        """
        for number, line in enumerate(self.lines):
            self._ran_before.append(len(self._running))
            if not self.graph.by_name[line.node].is_free:
                self._running.append(number)

    def put(self, transfer: Transfer, *, made: int, lag: int, lead: int) -> None:
        ran_before_value = self._ran_before[made + 1]
        fetches = transfer.fetches
        starts = [max(ran_before_value, self._ran_before[f.wanted] - lead) for f in fetches]
        wanted = fetches[0].wanted
        self._after.setdefault(made, []).append(_line(transfer.send, self.lines[made].phase))
        self._put(self._frees, transfer.sent, min(ran_before_value + lag, starts[0]), wanted)
        for fetch, start in zip(fetches, starts, strict=True):
            self._put(self._fetch_starts, fetch.begin, start, fetch.wanted)
            where = self._after if fetch.behind else self._fetch_ends
            where.setdefault(fetch.wanted, []).append(_line(fetch.end, Phase.BACKWARD))

    def _put(
        self, lines_at: dict[int, list[Instruction]], node: Node, num_run: int, wanted: int
    ) -> None:
        """Insert once ``num_run`` operators have run, but before the line that needs the value."""
        index = wanted if num_run == self._ran_before[wanted] else self._running[num_run]
        lines_at.setdefault(index, []).append(_line(node, self.lines[index].phase))

    def behind(self, number: int) -> list[Instruction]:
        return self._after.get(number, [])

    def before(self, number: int) -> list[Instruction]:
        groups = (self._frees, self._fetch_starts, self._fetch_ends)
        return [line for lines in groups for line in lines.get(number, [])]


def _line(node: Node, phase: Phase) -> Instruction:
    return Instruction(node=node.name, value=node.name, inputs=node.inputs, phase=phase)
