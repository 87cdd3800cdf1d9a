"""Recompute: drop a forward value after its last forward use and recompute it when needed.

This is the idea of Checkmate (Jain et al., MLSys 2020): each value is recomputed just before the
first backward line that needs it. If it may be recomputed several times, the other copies are made
after its longest idle intervals. Not for choosing values: see search/.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Self

from steelyard.errors import Mismatch
from steelyard.ir.graph import Graph, Node, Phase
from steelyard.ir.program import Instruction, Program
from steelyard.ir.rule import Rule, rule_of
from steelyard.ir.rule_kinds import Recomputation
from steelyard.ir.step_source import StepSource
from steelyard.passes.recompute_copies import Span, late_reads, starts
from steelyard.plans.offers import offers_of
from steelyard.plans.trade import Offer, Rejection

_ONCE: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class RecomputeRule(Recomputation):
    """``[[recompute]]``: a value, and the maximum number of its recomputations."""

    trade: str = field(init=False, default="recompute")


class Recompute:
    """Pays computation, buys memory; exact, because no random operator is ever recomputed."""

    name: ClassVar[str] = RecomputeRule.trade
    pays: ClassVar[tuple[str, ...]] = ("computation",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = True
    rule: ClassVar[type[Rule]] = RecomputeRule

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - other trades ask it
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        graph = program.graph
        offers = offers_of(RecomputeRule, graph, recomputable(graph))
        return offers, _refusals(self.name, graph)

    def rewrite(
        self,
        program: Program,
        rules: Sequence[RecomputeRule],
        source: StepSource,  # noqa: ARG002 - other trades ask it
    ) -> Program:
        allowed = recomputable(program.graph)
        named = rule_of(program.graph, rules)
        impossible = named.keys() - allowed
        if impossible:
            node = program.graph.by_name[min(impossible)]
            raise Mismatch(
                f"recompute rule for {node.op} in {node.path or 'the top level'}, which cannot be "
                "recomputed",
                expected="rules for values that the backward pass reads and that are not random",
                remedy="remove the rule from the plan, or plan again",
            )
        if len(named) < sum(rule.count for rule in rules) and any(r.times > 1 for r in rules):
            raise Mismatch(
                "two recompute rules name the same value, and at least one of them sets times",
                expected="each value in one rule, if any is recomputed more than once",
                remedy="remove one of them from the plan, or plan again",
            )
        if not named:
            return program
        times = Counter(i.node for i in program.recomputed if i.node in allowed)
        for value, rule in named.items():
            times[value] = max(times[value], rule.times)
        return with_copies(program, times, times=times)


def with_copies(
    program: Program, again: Iterable[str], *, times: Mapping[str, int] = _ONCE
) -> Program:
    """Return the program whose backward pass reads recomputed copies of these values.

    ``times`` has the maximum number of copies of each value that may be recomputed more than once.
    """
    graph = program.graph
    computed = [i for i in program.instructions if i.sink is None and not i.is_recomputed]
    first = _first_backward(computed)
    copied = _nodes_to_recompute(graph, frozenset(again))
    needed = _needed(graph, computed[first:], copied)
    placed = [_original(graph, i) for i in computed[:first]]
    copies = _Copies(graph, needed, _CopyTable.of(graph, computed, first, needed, times))
    for number in range(first, len(computed)):
        line = computed[number]
        placed += copies.target(graph.by_name[line.node].inputs, number)
        placed.append(copies.reading(line.node, line.node, line.phase, number))
    return program.with_lines(placed, on=graph)


def _first_backward(computed: Sequence[Instruction]) -> int:
    """Return the index of the first backward line."""
    phases = (i for i, ins in enumerate(computed) if ins.phase is Phase.BACKWARD)
    return next(phases, len(computed))


def _nodes_to_recompute(graph: Graph, recomputed: frozenset[str]) -> frozenset[str]:
    """Return the forward nodes to be recomputed: the values, multi-output operators, and their
    views.
    """
    copied: set[str] = set()
    for node in graph.forward():
        if node.name in recomputed:
            copied.add(node.name)
            if node.is_getitem:
                copied.add(node.inputs[0])
        elif graph.is_alias(node) and copied.intersection(node.inputs):
            # A view is recomputed only if its base is.
            copied.add(node.name)
    return frozenset(copied)


def _needed(graph: Graph, late: Sequence[Instruction], copied: frozenset[str]) -> frozenset[str]:
    """Return those of ``copied`` that the backward pass needs, directly or through other copies."""
    needed = {i for ins in late for i in graph.by_name[ins.node].inputs if i in copied}
    pending = list(needed)
    while pending:
        for name in graph.by_name[pending.pop()].inputs:
            if name in copied and name not in needed:
                needed.add(name)
                pending.append(name)
    return frozenset(needed)


def _original(graph: Graph, instruction: Instruction) -> Instruction:
    node = graph.by_name[instruction.node]
    return Instruction(node=node.name, value=node.name, inputs=node.inputs, phase=instruction.phase)


class _Copies:
    """Builds the lines that compute copies, and the lines that read them."""

    def __init__(self, graph: Graph, needed: frozenset[str], copy_table: "_CopyTable") -> None:
        self._graph = graph
        self._needed = needed
        self._copy_table = copy_table
        self._made: set[str] = set()

    def target(self, inputs: Iterable[str], number: int) -> list[Instruction]:
        """Return the copies to compute before these inputs can be read, in forward order."""
        graph, copy_table = self._graph, self._copy_table
        found: set[str] = set()
        pending = list(inputs)
        while pending:
            name = pending.pop()
            if name in found or not self._is_missing(name, number):
                continue
            found.add(name)
            pending += graph.by_name[name].inputs
            if graph.has_several(name):
                # All results that are read later are extracted at the same time, so that the others
                # die here.
                parts = (u for u in graph.users[name] if self._is_missing(u, number))
                found.update(u for u in parts if copy_table.is_read(u, number))
        lines = []
        for name in sorted(found, key=graph.position.__getitem__):
            copy = self._copy(name, number)
            self._made.add(copy)
            lines.append(self.reading(name, copy, Phase.BACKWARD, number))
        return lines

    def reading(self, node: str, value: str, phase: Phase, number: int) -> Instruction:
        """Return the line that computes this node, from copies of its inputs if they exist."""
        names = self._graph.by_name[node].inputs
        copies = (self._copy(i, number) for i in names)
        inputs = tuple(c if c in self._made else i for i, c in zip(names, copies, strict=True))
        return Instruction(node=node, value=value, inputs=inputs, phase=phase)

    def _is_missing(self, name: str, number: int) -> bool:
        return name in self._needed and self._copy(name, number) not in self._made

    def _copy(self, name: str, number: int) -> str:
        return copy_name(name, self._copy_table.of_line(name, number))


class _CopyTable:
    """The copies of values that are recomputed more than once, and the copy that each line
    reads.
    """

    def __init__(self) -> None:
        # The lines of the copies of each value and of each multi-output operator.
        self._starts: dict[str, tuple[int, ...]] = {}
        self._reads: dict[str, list[Span]] = {}
        # The base value of each view.
        self._base: dict[str, str] = {}

    @classmethod
    def of(
        cls,
        graph: Graph,
        computed: Sequence[Instruction],
        first: int,
        needed: frozenset[str],
        times: Mapping[str, int],
    ) -> Self:
        table = cls()
        if any(number > 1 for number in times.values()):
            table._read(graph, computed, first, needed)
            table._place(graph, times)
        return table

    def of_line(self, name: str, line: int) -> int:
        """Return the index of the copy that this line reads; 0 for the first."""
        lines = self._starts.get(self._base.get(name, name), ())
        return max(0, bisect(lines, line) - 1)

    def is_read(self, value: str, number: int) -> bool:
        """True if any line reads the same copy as line ``number``."""
        copy_index = self.of_line(value, number)
        starts_of_spans = (begin for begin, _ in self._reads.get(value, ()))
        return value not in self._reads or any(
            self.of_line(value, b) == copy_index for b in starts_of_spans
        )

    def _read(
        self, graph: Graph, computed: Sequence[Instruction], first: int, needed: frozenset[str]
    ) -> None:
        """Collect the spans in which the backward pass itself reads each value."""
        for node in graph.forward():
            if node.name not in needed:
                continue
            if graph.is_alias(node):
                self._base[node.name] = next(self._base[i] for i in node.inputs if i in self._base)
            elif not graph.has_several(node.name):
                self._base[node.name] = node.name
        on = {value: graph.storages_of(value)[0] for value in self._base.values()}
        late = late_reads(graph, computed, first, set(on.values()))
        self._reads = {value: late[storage] for value, storage in on.items()}

    def _place(self, graph: Graph, times: Mapping[str, int]) -> None:
        """Choose the lines of the copies, starting with the last operator: readers are placed
        before their inputs.
        """
        made: dict[str, list[str]] = {}
        for value in self._reads:
            node = graph.by_name[value]
            made.setdefault(node.inputs[0] if node.is_getitem else value, []).append(value)
        for maker in sorted(made, key=graph.position.__getitem__, reverse=True):
            reads = [span for value in made[maker] for span in self._reads[value]]
            most = max(times.get(value, 1) for value in made[maker])
            lines = starts(reads, most)
            self._starts.update(dict.fromkeys((maker, *made[maker]), lines))
            for name in graph.by_name[maker].inputs:
                if name in self._base:
                    self._reads[self._base[name]] += [(line, line) for line in lines]


def copy_name(name: str, turn: int = 0) -> str:
    return f"{name}.copy{turn + 1}" if turn else f"{name}.copy"


def recomputable(graph: Graph) -> frozenset[str]:
    """Return the forward values that the backward pass needs and whose recomputation is bitwise
    equal.
    """
    outputs = {o.node for o in graph.outputs}
    leaving = {s for name in outputs for s in graph.storages_of(name)}
    found: set[str] = set()
    useful = graph.reaching_backward
    for node in graph.forward():
        maker = graph.by_name[node.inputs[0]] if node.is_getitem else node
        if node.name not in useful or node.name in outputs or maker.is_free:
            continue
        if node is maker and graph.has_several(node.name):
            continue
        if leaving.intersection(graph.storages_of(node.name)):
            continue
        if _why_not_recomputable(graph, maker) is None:
            found.add(node.name)
    return frozenset(found)


def _why_not_recomputable(graph: Graph, node: Node) -> str | None:
    """Return why a second call would differ or have side effects; None if it would not."""
    if node.is_random:
        is_torchs = node.op.startswith(("aten.", "steelyard."))
        return f"{'is' if is_torchs else 'may be'} random: a second call would draw other numbers"
    if node.collective is not None or node.op.startswith("_c10d_functional"):
        return "communicates: every rank would have to repeat it"
    if node.is_packing:
        return "is part of a collective, which is not repeated"
    if node.body is not None:
        return "is computed in slices, together with its gradients"
    if node.mutates:
        return "writes into its argument"
    if graph.written.intersection(s for i in node.inputs for s in graph.storages_of(i)):
        return "reads what another operator overwrites"
    own = list(graph.storages_of(node.name))
    if len({t.storage for t in node.outputs}) != len(node.outputs):
        return "returns two results in one storage"
    if any(s in graph.storages_of(i) for i in node.inputs for s in own):
        return "returns one of its arguments"
    if any(u for u in graph.users[node.name] if _reads_whole(graph, node, u)):
        return "is read whole by the backward pass"
    return None


def _reads_whole(graph: Graph, node: Node, user: str) -> bool:
    """True if the backward pass reads a multi-output operator, or something reads it without
    getitem.
    """
    reader = graph.by_name[user]
    late = reader.phase is not Phase.FORWARD
    return graph.has_several(node.name) and (late or not reader.is_getitem)


def _refusals(trade: str, graph: Graph) -> tuple[Rejection, ...]:
    """Return the operators that are not offered because they cannot be called again."""
    useful = graph.reaching_backward
    reasons: dict[tuple[str, str], int] = {}
    for node in graph.forward():
        if node.is_free or node.name not in useful:
            continue
        reason = _why_not_recomputable(graph, node)
        if reason is not None:
            reasons[node.op, reason] = reasons.get((node.op, reason), 0) + 1
    return tuple(
        Rejection(trade=trade, label=f"{op} ({count})", reason=reason)
        for (op, reason), count in sorted(reasons.items())
    )
