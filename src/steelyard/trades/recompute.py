"""Recompute: forget a forward value after its last use there, make it again for the backward pass.

Checkmate's trade (Jain et al., MLSys 2020), each value made at most twice, the second time just
before the first line that needs it. Not for choosing which values: see search/.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from steelyard.core.errors import Mismatch
from steelyard.core.graph import Graph, Node, Phase
from steelyard.core.offers import offers_of
from steelyard.core.program import Instruction, Program
from steelyard.core.rules import Rule, matching
from steelyard.core.trade import Offer, Refusal, Source


class Recompute:
    """Pays computation, buys memory; exact, because nothing random is ever made twice."""

    name: ClassVar[str] = "recompute"
    pays: ClassVar[tuple[str, ...]] = ("computation",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = True

    def offers(
        self,
        program: Program,
        source: Source,  # noqa: ARG002 - other trades ask it
    ) -> tuple[tuple[Offer, ...], tuple[Refusal, ...]]:
        graph = program.graph
        offers = offers_of(self.name, graph, recomputable(graph))
        return offers, _refusals(self.name, graph)

    def rewrite(
        self,
        program: Program,
        rules: Sequence[Rule],
        source: Source,  # noqa: ARG002 - other trades ask it
    ) -> Program:
        values = matching(program.graph, rules)
        never = values - recomputable(program.graph)
        if never:
            node = program.graph.by_name[min(never)]
            raise Mismatch(
                f"recompute rule for {node.op} in {node.path or 'the top level'}, which cannot be "
                "computed again",
                expected="rules for values that the backward pass reads and that are not random",
                remedy="take the rule out of the plan, or plan again",
            )
        if not values:
            return program
        already = {i.node for i in program.again}
        return with_copies(program, values | already)


def with_copies(program: Program, again: Iterable[str]) -> Program:
    """The program whose backward pass reads copies of these values instead of the values."""
    graph = program.graph
    computed = [i for i in program.instructions if i.sink is None and not i.is_again]
    first = _first_backward(computed)
    copied = _copied(graph, frozenset(again))
    needed = _needed(graph, computed[first:], copied)
    placed = [_original(graph, i) for i in computed[:first]]
    made: set[str] = set()
    for instruction in computed[first:]:
        node = graph.by_name[instruction.node]
        for name in _missing(graph, node.inputs, needed, made):
            made.add(name)
            placed.append(_copy(graph, name, made))
        placed.append(_reading_copies(node, node.name, made, instruction.phase))
    return Program.of(graph, placed, repeats=program.repeats, update=program.update)


def _first_backward(computed: Sequence[Instruction]) -> int:
    """Where the backward pass begins."""
    phases = (i for i, ins in enumerate(computed) if ins.phase is Phase.BACKWARD)
    return next(phases, len(computed))


def _copied(graph: Graph, again: frozenset[str]) -> frozenset[str]:
    """The forward nodes to be made again: the values, operators of several results, views."""
    copied: set[str] = set()
    for node in graph.forward():
        if node.name in again:
            copied.add(node.name)
            if node.is_getitem:
                copied.add(node.inputs[0])
        elif graph.is_look(node) and copied.intersection(node.inputs):
            # A view follows what it looks at; only views of copies are made again.
            copied.add(node.name)
    return frozenset(copied)


def _needed(graph: Graph, late: Sequence[Instruction], copied: frozenset[str]) -> frozenset[str]:
    """Those of ``copied`` that the backward pass reads, or a copy that it reads, and so on."""
    needed = {i for ins in late for i in graph.by_name[ins.node].inputs if i in copied}
    pending = list(needed)
    while pending:
        for name in graph.by_name[pending.pop()].inputs:
            if name in copied and name not in needed:
                needed.add(name)
                pending.append(name)
    return frozenset(needed)


def _missing(
    graph: Graph, inputs: Iterable[str], needed: frozenset[str], made: set[str]
) -> list[str]:
    """The copies to make before these inputs can be read, in the order of the forward pass."""
    found: set[str] = set()
    pending = list(inputs)
    while pending:
        name = pending.pop()
        if name not in needed or name in made or name in found:
            continue
        found.add(name)
        pending += graph.by_name[name].inputs
        if graph.has_several(name):
            # All results that will be read are taken at once, so that the rest dies here.
            found.update(u for u in graph.users[name] if u in needed and u not in made)
    return sorted(found, key=graph.position.__getitem__)


def _original(graph: Graph, instruction: Instruction) -> Instruction:
    node = graph.by_name[instruction.node]
    return Instruction(node=node.name, value=node.name, inputs=node.inputs, phase=instruction.phase)


def _copy(graph: Graph, name: str, made: set[str]) -> Instruction:
    return _reading_copies(graph.by_name[name], again_name(name), made, Phase.BACKWARD)


def _reading_copies(node: Node, value: str, made: set[str], phase: Phase) -> Instruction:
    inputs = tuple(again_name(i) if i in made else i for i in node.inputs)
    return Instruction(node=node.name, value=value, inputs=inputs, phase=phase)


def again_name(name: str) -> str:
    return f"{name}.again"


def recomputable(graph: Graph) -> frozenset[str]:
    """The forward values that can be made again to the same bits, and of which the backward pass
    reads something."""
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
        if _why_never(graph, maker) is None:
            found.add(node.name)
    return frozenset(found)


def _why_never(graph: Graph, node: Node) -> str | None:
    """Why calling this operator again would not give the same, or would do more than that."""
    if node.is_random:
        is_torchs = node.op.startswith(("aten.", "steelyard."))
        return f"{'is' if is_torchs else 'may be'} random: a second call would draw other numbers"
    if node.collective is not None or node.op.startswith("_c10d_functional"):
        return "communicates: every rank would have to call it again"
    if node.body is not None:
        return "is carried out in slices, gradients and all"
    if node.mutates:
        return "writes into its argument"
    if graph.written.intersection(s for i in node.inputs for s in graph.storages_of(i)):
        return "reads what another operator overwrites"
    own = list(graph.storages_of(node.name))
    if len({t.storage for t in node.outputs}) != len(node.outputs):
        return "gives two results on one storage"
    if any(s in graph.storages_of(i) for i in node.inputs for s in own):
        return "gives one of its arguments back"
    if any(u for u in graph.users[node.name] if _reads_whole(graph, node, u)):
        return "is read as a whole by the backward pass"
    return None


def _reads_whole(graph: Graph, node: Node, user: str) -> bool:
    """An operator of several results that is taken apart late, or not by getitem."""
    reader = graph.by_name[user]
    late = reader.phase is not Phase.FORWARD
    return graph.has_several(node.name) and (late or not reader.is_getitem)


def _refusals(trade: str, graph: Graph) -> tuple[Refusal, ...]:
    """The operators that would have been offered if they could be called again."""
    useful = graph.reaching_backward
    reasons: dict[tuple[str, str], int] = {}
    for node in graph.forward():
        if node.is_free or node.name not in useful:
            continue
        reason = _why_never(graph, node)
        if reason is not None:
            reasons[node.op, reason] = reasons.get((node.op, reason), 0) + 1
    return tuple(
        Refusal(trade=trade, label=f"{op} ({count})", reason=reason)
        for (op, reason), count in sorted(reasons.items())
    )
