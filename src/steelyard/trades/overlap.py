"""Overlap: delay the waits for collectives, and issue collectives some operators earlier.

Operators then compute during the exchange. Both may need more memory: for results that have already
arrived, and for arguments that a backend needs until the wait. The trade is applied after every
trade that inserts collectives. Not for the collectives themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from steelyard.ir.graph import Graph
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.rule_kinds import WITHIN_PEAK, CollectiveOverlap
from steelyard.ir.step_source import StepSource
from steelyard.passes.data_parallel.overlap import issued_ahead, sent_first, waits_within
from steelyard.plans.trade import Offer, Rejection


@dataclass(frozen=True, kw_only=True)
class OverlapRule(CollectiveOverlap):
    """``[[overlap]]``: the delay of waits and the advance of collectives."""

    trade: str = field(init=False, default="overlap")

    def describe(self) -> str:
        within = f", within the {self.within}" if self.within else ""
        ahead = f", ahead {self.ahead}{within}" if self.ahead else ""
        return f"window {self.window}{ahead}"


class Overlap:
    """Pays memory, buys communication."""

    name: ClassVar[str] = OverlapRule.trade
    pays: ClassVar[tuple[str, ...]] = ("memory",)
    buys: ClassVar[tuple[str, ...]] = ("communication",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = True
    rule: ClassVar[type[Rule]] = OverlapRule

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - the program's exchanges decide
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        count = len(program.exchanges)
        windows = sorted({min(2**k, count) for k in range(count.bit_length() + 1)}) if count else ()
        offers = (
            Offer(
                trade=self.name,
                label=f"wait {window} exchange{'s' if window > 1 else ''} later",
                rules=(OverlapRule(window=window),),
            )
            for window in windows
        )
        return tuple(offers), ()

    def rewrite(
        self,
        program: Program,
        rules: Sequence[OverlapRule],
        source: StepSource,  # noqa: ARG002 - the program's exchanges decide
    ) -> Program:
        if not rules or not program.exchanges:
            return program
        assert not program.recomputed, "overlap orders the graph, so it is applied before recompute"
        if not program.layout.shares:  # unequal ranks might choose different orders
            reordered = sent_first(program)
            # This is invalid if another line reads a sum after it was sent.
            is_whole = not reordered.problems()
            program = reordered if is_whole and _peak(reordered) <= _peak(program) else program
        delayed = waits_within(program, max(rule.window for rule in rules))
        ahead = max(rule.ahead for rule in rules)
        if ahead:
            headroom = (
                _headroom(delayed) if any(rule.within == WITHIN_PEAK for rule in rules) else ()
            )
            delayed = issued_ahead(delayed, ahead, headroom)
        return program.with_graph(_in_order_of(delayed))


def _peak(program: Program) -> int:
    # Imported here: reading a plan imports this trade, but not the predictor.
    from steelyard.predict.liveness import liveness

    return liveness(program, None).peak_bytes


def _headroom(program: Program) -> tuple[int, ...]:
    """Return the free bytes below the peak at each line."""
    from steelyard.predict.liveness import liveness

    found = liveness(program, None)
    alive = zip(program.instructions, found.bytes_at, strict=True)
    return tuple(found.peak_bytes - nbytes for line, nbytes in alive if line.sink is None)


def _in_order_of(program: Program) -> Graph:
    """Return the program's graph with its nodes in instruction order.

    A node that no instruction computes stays in front of its old successor.
    """
    graph = program.graph
    place = {line.value: at for at, line in enumerate(program.instructions) if line.sink is None}
    keys: dict[str, tuple[int, int]] = {}
    following = len(program.instructions)
    for at, node in reversed([*enumerate(graph.nodes)]):
        if node.is_input:
            keys[node.name] = (-1, at)
            continue
        following = place.get(node.name, following)
        keys[node.name] = (following, at)
    ordered = replace(graph, nodes=tuple(sorted(graph.nodes, key=lambda n: keys[n.name])))
    assert not ordered.problems(), ordered.problems()
    return ordered
