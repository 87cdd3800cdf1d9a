"""Quantize activations: save a forward value in 8 bits until the backward pass reads it.

This is the idea of ActNN (Chen et al., ICML 2021), with plain rounding: the forward pass is exact,
and the error only affects gradients. Not for choosing values or the accepted loss: see search/ and
planner/lossy.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from steelyard.errors import Mismatch
from steelyard.ir.graph import Graph, Node, Phase
from steelyard.ir.program import Instruction, Program
from steelyard.ir.quantized_activation import QuantizedActivation, can_be_coded, chooses, chosen_by
from steelyard.ir.rule import Rule, matching
from steelyard.ir.rule_kinds import ValueCodec
from steelyard.ir.saved_activations import (
    LEAST_BYTES,
    BackwardRewriter,
    first_backward_line,
    first_backward_reader,
    saved_for_backward,
)
from steelyard.ir.step_source import StepSource
from steelyard.plans.offers import offers_of
from steelyard.plans.trade import Offer, Rejection

_NOT_UNDER_INDUCTOR = (
    "only plans for generated Python are probed, and an unprobed plan is not accepted"
)


@dataclass(frozen=True, kw_only=True)
class QuantizeActivationsRule(ValueCodec):
    """``[[quantize_activations]]``: a value that is saved in 8 bits."""

    trade: str = field(init=False, default="quantize_activations")


class QuantizeActivations:
    """Pays accuracy of the gradients and a little computation, buys memory."""

    name: ClassVar[str] = QuantizeActivationsRule.trade
    pays: ClassVar[tuple[str, ...]] = ("accuracy", "computation")
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = False
    is_bitwise: ClassVar[bool] = False
    probe: ClassVar[str] = "steelyard.quantization_error"
    rule: ClassVar[type[Rule]] = QuantizeActivationsRule

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - other trades ask it
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        graph = program.graph
        offers = offers_of(QuantizeActivationsRule, graph, quantizable(program))
        reason = _NOT_UNDER_INDUCTOR
        if not graph.decomposition.startswith("inductor"):
            if offers:
                return offers, ()
            reason = "no floating-point value is large, unsliced and read only by the backward pass"
        return (), (Rejection(trade=self.name, label="everything", reason=reason),)

    def rewrite(
        self,
        program: Program,
        rules: Sequence[QuantizeActivationsRule],
        source: StepSource,  # noqa: ARG002 - other trades ask it
    ) -> Program:
        if not rules:
            return program
        if program.graph.decomposition.startswith("inductor"):
            raise Mismatch(
                f"quantize_activations rules in a plan for Inductor: {_NOT_UNDER_INDUCTOR}",
                expected="a plan for the python runner",
                remedy="remove the quantize_activations rules from the plan, or plan again",
            )
        chosen = matching(program.graph, rules)
        if len(chosen) < sum(rule.count for rule in rules):
            raise Mismatch(
                "two quantize_activations rules name the same value",
                expected="each value in one rule, because it is quantized once",
                remedy="remove one of them from the plan, or plan again",
            )
        recomputed = {i.node for i in program.recomputed}
        # A smaller batch may make values smaller than the size that is worthwhile; they are still
        # encoded.
        impossible = sorted(chosen & recomputed) or sorted(
            chosen - quantizable(program, least_bytes=1)
        )
        if impossible:
            node = program.graph.by_name[impossible[0]]
            problem = "is recomputed" if impossible[0] in recomputed else "cannot be kept in 8 bits"
            raise Mismatch(
                f"quantize_activations rule for {node.op} in {node.path or 'the top level'}, "
                f"which {problem}",
                expected="rules for floating-point values that the backward pass reads, once each",
                remedy="remove the rule from the plan, or plan again",
            )
        coded = with_codes(program, chosen)
        inexact = _inexact_choice(coded)
        if inexact is not None:
            raise Mismatch(
                f"{inexact.op} in {inexact.path or 'the top level'} would compare values "
                "recomputed from 8 bits, and could choose differently than the forward pass",
                expected="compared and sorted values that are not recomputed, or none of their "
                "inputs in 8 bits",
                remedy="remove the recompute rules of its inputs from the plan, or plan again",
            )
        return coded


def quantizable(program: Program, *, least_bytes: int = LEAST_BYTES) -> frozenset[str]:
    """Return the values that could be saved in 8 bits."""
    graph = program.graph
    able = saved_for_backward(program, least_bytes=least_bytes) - chosen_by(graph)
    return frozenset(name for name in able if can_be_coded(graph.by_name[name].outputs[0]))


def with_codes(program: Program, chosen: Iterable[str]) -> Program:
    """Return the program that encodes these values and whose backward pass reads the decoded ones.

    A value is encoded after its last use in the forward pass. A value that the backward pass does
    not read stays.
    """
    graph = program.graph
    lines = [i for i in program.instructions if i.sink is None]
    first_reader = first_backward_reader(graph, lines, chosen)
    if not first_reader:
        return program
    in_order = sorted(first_reader, key=graph.position.__getitem__)
    encodings = [
        QuantizedActivation.of(graph, value, number=len(graph.storages) + place)
        for place, value in enumerate(in_order)
    ]
    behind, before = _places(graph, lines, encodings, first_reader)
    rewriter = BackwardRewriter(graph, {c.value: c.decode.name for c in encodings})
    first = first_backward_line(lines)
    ordered: list[Instruction] = []
    for number, line in enumerate(lines):
        ordered += [_line(c.decode, Phase.BACKWARD) for c in before.get(number, ())]
        ordered += rewriter.rewritten(line) if number >= first else [line]
        ordered += [_line(c.encode, Phase.FORWARD) for c in behind.get(number, ())]
    encoded = replace(
        graph,
        nodes=_in_order(graph, lines, behind=behind, before=before),
        storages=(*graph.storages, *(c.storage for c in encodings)),
    )
    result = program.with_lines(ordered, on=encoded)
    assert not result.problems(), result.problems()
    assert not encoded.problems(), encoded.problems()
    return result


def _inexact_choice(program: Program) -> Node | None:
    """Return an operator that would compute indices or a mask from inexact values, if any."""
    graph = program.graph
    inexact = {f"{value}.decoded" for value in program.quantized}
    for line in program.instructions:
        if line.sink is None and inexact.intersection(line.inputs):
            node = graph.by_name[line.node]
            if chooses(graph, node):
                return node
            if line.is_recomputed:
                inexact.add(line.value)
    return None


_Places = dict[int, list[QuantizedActivation]]


def _places(
    graph: Graph,
    lines: Sequence[Instruction],
    encodings: Sequence[QuantizedActivation],
    first_reader: Mapping[str, int],
) -> tuple[_Places, _Places]:
    """Return the lines after which values are encoded, and those before which they are decoded.

    If several values are encoded at one line, the smallest is encoded first and decoded last. This
    minimizes the memory for having both forms of a value.
    """
    last: dict[int, int] = {}
    for number, line in enumerate(lines[: first_backward_line(lines)]):
        for name in (line.node, *line.inputs):
            last.update(dict.fromkeys(graph.storages_of(name), number))
    behind: _Places = {}
    before: _Places = {}

    def size(encoding: QuantizedActivation) -> tuple[int, int]:
        (tensor,) = encoding.decode.outputs
        return tensor.nbytes, -tensor.storage

    for encoding in sorted(encodings, key=size):
        (tensor,) = encoding.decode.outputs
        behind.setdefault(last[tensor.storage], []).append(encoding)
    for encoding in sorted(encodings, key=size, reverse=True):
        before.setdefault(first_reader[encoding.value], []).append(encoding)
    return behind, before


def _in_order(
    graph: Graph, lines: Sequence[Instruction], *, behind: _Places, before: _Places
) -> tuple[Node, ...]:
    """Return the nodes roughly in execution order, since cache effects are measured in this
    order.
    """
    after: dict[str, list[Node]] = {}
    ahead: dict[str, list[Node]] = {}
    for number, encodings in behind.items():
        after.setdefault(lines[number].node, []).extend(c.encode for c in encodings)
    for number, encodings in before.items():
        # The node of a recomputed line is in the forward pass, so the decoding is placed before its
        # reader in the backward pass instead.
        reader = next(line for line in lines[number:] if not line.is_recomputed)
        ahead.setdefault(reader.node, []).extend(c.decode for c in encodings)
    return tuple(
        node
        for own in graph.nodes
        for node in (*ahead.get(own.name, ()), own, *after.get(own.name, ()))
    )


def _line(node: Node, phase: Phase) -> Instruction:
    return Instruction(node=node.name, value=node.name, inputs=node.inputs, phase=phase)
