"""Quantize activations: keep a forward value in 8 bits until the backward pass reads it.

ActNN's trade (Chen et al., ICML 2021), with plain rounding: the forward pass is computed as before
and only gradients see what was lost. Not for which values, nor for what may be lost: see search/
and planner/lossy.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from steelyard.errors import Mismatch
from steelyard.ir.graph import Graph, Node, Phase
from steelyard.ir.program import Instruction, Program
from steelyard.ir.quantized_activation import QuantizedActivation, can_be_coded, chooses, chosen_by
from steelyard.ir.rule import Rule, matching
from steelyard.ir.saved_activations import (
    LEAST_BYTES,
    Late,
    first_late,
    first_wanted,
    saved_for_backward,
)
from steelyard.ir.step_source import StepSource
from steelyard.plans.offers import offers_of
from steelyard.plans.rule_table import CallTable, RuleTable
from steelyard.plans.trade import Offer, Rejection

_NOT_UNDER_INDUCTOR = "only plans for generated Python are probed, and none is believed without"


class QuantizeActivationsTable(CallTable):
    """``[[quantize_activations]]``: a value that is kept in 8 bits."""


class QuantizeActivations:
    """Pays accuracy of the gradients and a little computation, buys memory."""

    name: ClassVar[str] = "quantize_activations"
    pays: ClassVar[tuple[str, ...]] = ("accuracy", "computation")
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = False
    is_bitwise: ClassVar[bool] = False
    table: ClassVar[type[RuleTable]] = QuantizeActivationsTable

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - other trades ask it
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        graph = program.graph
        offers = offers_of(self.name, graph, quantizable(program))
        reason = _NOT_UNDER_INDUCTOR
        if not graph.decomposition.startswith("inductor"):
            if offers:
                return offers, ()
            reason = "no floating-point value is large, whole and read by the backward pass alone"
        return (), (Rejection(trade=self.name, label="everything", reason=reason),)

    def rewrite(
        self,
        program: Program,
        rules: Sequence[Rule],
        source: StepSource,  # noqa: ARG002 - other trades ask it
    ) -> Program:
        if not rules:
            return program
        if program.graph.decomposition.startswith("inductor"):
            raise Mismatch(
                f"quantize_activations rules in a plan for Inductor: {_NOT_UNDER_INDUCTOR}",
                expected="a plan for the runner python",
                remedy="take the quantize_activations rules out of the plan, or plan again",
            )
        chosen = matching(program.graph, rules)
        if len(chosen) < sum(rule.count for rule in rules):
            raise Mismatch(
                "two quantize_activations rules name the same value",
                expected="each value in one rule: it is written down once",
                remedy="take one of them out of the plan, or plan again",
            )
        made_again = {i.node for i in program.again}
        # A smaller batch may make them smaller than is worth it; they are coded all the same.
        never = sorted(chosen & made_again) or sorted(chosen - quantizable(program, least_bytes=1))
        if never:
            node = program.graph.by_name[never[0]]
            why = "is computed again" if never[0] in made_again else "cannot be kept in 8 bits"
            raise Mismatch(
                f"quantize_activations rule for {node.op} in {node.path or 'the top level'}, "
                f"which {why}",
                expected="rules for floating-point values that the backward pass reads, once each",
                remedy="take the rule out of the plan, or plan again",
            )
        coded = with_codes(program, chosen)
        misled = _misled(coded)
        if misled is not None:
            raise Mismatch(
                f"{misled.op} in {misled.path or 'the top level'} would choose by what is computed "
                "again from 8 bits, and otherwise than the forward pass did",
                expected="what is compared or sorted as it was, or nothing above it in 8 bits",
                remedy="take the recompute rules of what it reads out of the plan, or plan again",
            )
        return coded


def quantizable(program: Program, *, least_bytes: int = LEAST_BYTES) -> frozenset[str]:
    """The values that could be kept in 8 bits."""
    graph = program.graph
    able = saved_for_backward(program, least_bytes=least_bytes) - chosen_by(graph)
    return frozenset(name for name in able if can_be_coded(graph.by_name[name].outputs[0]))


def with_codes(program: Program, chosen: Iterable[str]) -> Program:
    """The program that writes these values down after their last use in the forward pass, and late
    reads what is read back. A value that nothing reads late stays as it is."""
    graph = program.graph
    lines = [i for i in program.instructions if i.sink is None]
    wanted = first_wanted(graph, lines, chosen)
    if not wanted:
        return program
    in_order = sorted(wanted, key=graph.position.__getitem__)
    codings = [
        QuantizedActivation.of(graph, value, number=len(graph.storages) + place)
        for place, value in enumerate(in_order)
    ]
    behind, before = _places(graph, lines, codings, wanted)
    late = Late(graph, {c.value: c.decode.name for c in codings})
    first = first_late(lines)
    ordered: list[Instruction] = []
    for number, line in enumerate(lines):
        ordered += [_line(c.decode, Phase.BACKWARD) for c in before.get(number, ())]
        ordered += late.rewritten(line) if number >= first else [line]
        ordered += [_line(c.encode, Phase.FORWARD) for c in behind.get(number, ())]
    coded = replace(
        graph,
        nodes=_in_order(graph, lines, behind=behind, before=before),
        storages=(*graph.storages, *(c.storage for c in codings)),
    )
    result = program.with_lines(ordered, on=coded)
    assert not result.problems(), result.problems()
    assert not coded.problems(), coded.problems()
    return result


def _misled(program: Program) -> Node | None:
    """An operator that makes indices or a mask of copies that are not what they are copies of."""
    graph = program.graph
    inexact = {f"{value}.decoded" for value in program.coded}
    for line in program.instructions:
        if line.sink is None and inexact.intersection(line.inputs):
            node = graph.by_name[line.node]
            if chooses(graph, node):
                return node
            if line.is_again:
                inexact.add(line.value)
    return None


_Places = dict[int, list[QuantizedActivation]]


def _places(
    graph: Graph,
    lines: Sequence[Instruction],
    codings: Sequence[QuantizedActivation],
    wanted: Mapping[str, int],
) -> tuple[_Places, _Places]:
    """Behind which line each value is written down, and before which it is read back.

    Of several at one place the smallest is written down first and read back last, which needs the
    least room for both forms of one value.
    """
    last: dict[int, int] = {}
    for number, line in enumerate(lines[: first_late(lines)]):
        for name in (line.node, *line.inputs):
            last.update(dict.fromkeys(graph.storages_of(name), number))
    behind: _Places = {}
    before: _Places = {}

    def size(coding: QuantizedActivation) -> tuple[int, int]:
        (tensor,) = coding.decode.outputs
        return tensor.nbytes, -tensor.storage

    for coding in sorted(codings, key=size):
        (tensor,) = coding.decode.outputs
        behind.setdefault(last[tensor.storage], []).append(coding)
    for coding in sorted(codings, key=size, reverse=True):
        before.setdefault(wanted[coding.value], []).append(coding)
    return behind, before


def _in_order(
    graph: Graph, lines: Sequence[Instruction], *, behind: _Places, before: _Places
) -> tuple[Node, ...]:
    """The nodes about as they run: what one finds in the caches is measured in this order."""
    after: dict[str, list[Node]] = {}
    ahead: dict[str, list[Node]] = {}
    for number, codings in behind.items():
        after.setdefault(lines[number].node, []).extend(c.encode for c in codings)
    for number, codings in before.items():
        # A copy's own node stands in the forward pass; what it is made for does not.
        reader = next(line for line in lines[number:] if not line.is_again)
        ahead.setdefault(reader.node, []).extend(c.decode for c in codings)
    return tuple(
        node
        for own in graph.nodes
        for node in (*ahead.get(own.name, ()), own, *after.get(own.name, ()))
    )


def _line(node: Node, phase: Phase) -> Instruction:
    return Instruction(node=node.name, value=node.name, inputs=node.inputs, phase=phase)
