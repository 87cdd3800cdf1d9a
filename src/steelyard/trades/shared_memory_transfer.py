"""Shared-memory transfer: ranks of one host exchange messages through shared memory.

The messages of a step, between pipeline stages or in all-reduces, have the same shapes every time.
So the reader allocates slots once, and the sender writes into them. This needs no copy through a
connection on either side, no thread to schedule, and no allocation in any step. Xue et al. (EuroSys
2019) use the same mechanism, fixed slots that are allocated before the transfer, over RDMA. Not for
the slots (see comm/shared_memory/slots.py) or the exchange (see comm/shared_memory/collectives.py).
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from steelyard.errors import Mismatch
from steelyard.ir.collective import THROUGH_SLOTS
from steelyard.ir.graph import Graph, Node
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.rule_kinds import MessageKind, SharedMemoryMessages
from steelyard.ir.step_source import StepSource
from steelyard.plans.trade import Offer, Rejection


@dataclass(frozen=True, kw_only=True)
class SharedMemoryTransferRule(SharedMemoryMessages):
    """``[[shared_memory_transfer]]``: the messages that go through shared memory."""

    trade: str = field(init=False, default="shared_memory_transfer")

    def describe(self) -> str:
        return f"messages of {self.messages}"


class SharedMemoryTransfer:
    """Pays memory, buys communication."""

    name: ClassVar[str] = SharedMemoryTransferRule.trade
    pays: ClassVar[tuple[str, ...]] = ("memory",)
    buys: ClassVar[tuple[str, ...]] = ("communication",)
    is_exact: ClassVar[bool] = True
    # With more than two ranks, the order of summation is not that of gloo.
    is_bitwise: ClassVar[bool] = False
    rule: ClassVar[type[Rule]] = SharedMemoryTransferRule

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - the program says what is sent
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        if program.pipeline is not None:
            what, kind = "pipeline messages", STAGES
        elif _rank_collectives(program.graph):
            what, kind = "exchanges", EXCHANGES
        else:
            return (), ()
        offer = Offer(
            trade=self.name,
            label=f"{what} through shared memory",
            rules=(SharedMemoryTransferRule(messages=kind),),
        )
        return (offer,), ()

    def rewrite(
        self,
        program: Program,
        rules: Sequence[SharedMemoryTransferRule],
        source: StepSource,  # noqa: ARG002 - the program says what is sent
    ) -> Program:
        if not rules:
            return program
        kind, pipeline, graph = rules[0].messages, program.pipeline, program.graph
        if kind == STAGES and pipeline is not None:
            return replace(program, pipeline=replace(pipeline, is_pinned=True))
        if kind == EXCHANGES and pipeline is None and (exchanged := _rank_collectives(graph)):
            return replace(program, graph=_pinned(graph, exchanged))
        what, needs = _NEEDS[kind]
        raise Mismatch(
            f"the plan has shared_memory_transfer for {what}",
            expected=f"{needs} in the same plan",
            remedy="remove the shared_memory_transfer rule from the plan, or plan again",
        )


def _rank_collectives(graph: Graph) -> frozenset[str]:
    """Return the calls that issue collectives among ranks."""
    issued = ((name, graph.by_name[name].collective) for name in graph.collectives)
    return frozenset(name for name, c in issued if c is not None and not c.is_transfer)


def _pinned(graph: Graph, exchanged: Container[str]) -> Graph:
    nodes = tuple(_through_slots(n) if n.name in exchanged else n for n in graph.nodes)
    return replace(graph, nodes=nodes)


def _through_slots(node: Node) -> Node:
    original = node.collective
    assert original is not None
    pinned = THROUGH_SLOTS.collective(
        original.kind, axis=original.axis, num_ranks=original.num_ranks,
        nbytes=original.whole_bytes, stride=original.stride,
    )  # fmt: skip
    return replace(node, collective=pinned)


# The kinds of messages that a rule can name.
STAGES: MessageKind = "stages"
EXCHANGES: MessageKind = "exchanges"
_NEEDS = {
    STAGES: ("pipeline messages, but has no pipeline stages", "[[shard_pipeline]] rules"),
    EXCHANGES: ("collectives, but has no ranks that share its batch or tensors, or has stages",
                "[[shard_batch]] or [[shard_tensor]] rules and no [[shard_pipeline]]"),
}  # fmt: skip
