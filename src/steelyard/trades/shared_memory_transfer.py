"""Pinned transfer: ranks of one host send one another what they do through memory that they share.

What a step sends has the same shape every time, between stages as well as of gradients that are
summed up. So whoever reads it makes room once, and whoever sends it writes it there: no copy
through a connection on either side, no thread that takes a turn, and no room made in any step.
Fixed slots ahead of the transfer are the mechanism of Xue et al. (EuroSys 2019), there over RDMA.
Not for the slots themselves: see comm/shared_memory/slots.py, and for what is exchanged,
comm/shared_memory/collectives.py.
"""

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from steelyard.errors import Mismatch
from steelyard.ir.collective import THROUGH_SLOTS
from steelyard.ir.graph import Graph, Node
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.step_source import StepSource
from steelyard.plans.rule_table import RuleTable
from steelyard.plans.trade import Offer, Rejection


class SharedMemoryTransferTable(RuleTable):
    """``[[shared_memory_transfer]]``: the messages that go through shared memory."""

    op: Annotated[Literal["stages", "exchanges"], Field(alias="messages")] = "stages"


class SharedMemoryTransfer:
    """Pays memory, buys communication."""

    name: ClassVar[str] = "shared_memory_transfer"
    pays: ClassVar[tuple[str, ...]] = ("memory",)
    buys: ClassVar[tuple[str, ...]] = ("communication",)
    is_exact: ClassVar[bool] = True
    # Of more than two ranks, sums are added up in another order than gloo's.
    is_bitwise: ClassVar[bool] = False
    table: ClassVar[type[RuleTable]] = SharedMemoryTransferTable

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - the program says what is sent
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        if program.pipeline is not None:
            what, op = "messages of stages", STAGES
        elif _among_ranks(program.graph):
            what, op = "exchanges", EXCHANGES
        else:
            return (), ()
        offer = Offer(
            trade=self.name,
            label=f"{what} through slots",
            rules=(Rule(trade=self.name, op=op),),
        )
        return (offer,), ()

    def rewrite(
        self,
        program: Program,
        rules: Sequence[Rule],
        source: StepSource,  # noqa: ARG002 - the program says what is sent
    ) -> Program:
        if not rules:
            return program
        op, pipeline, graph = rules[0].op, program.pipeline, program.graph
        if op == STAGES and pipeline is not None:
            return replace(program, pipeline=replace(pipeline, is_pinned=True))
        if op == EXCHANGES and pipeline is None and (exchanged := _among_ranks(graph)):
            return replace(program, graph=_pinned(graph, exchanged))
        what, needs = _NEEDS[op]
        raise Mismatch(
            f"the plan has shared_memory_transfer for {what}",
            expected=f"{needs} beside it",
            remedy="take the shared_memory_transfer rule out of the plan, or plan again",
        )


def _among_ranks(graph: Graph) -> frozenset[str]:
    """The calls that issue exchanges among ranks."""
    issued = ((name, graph.by_name[name].collective) for name in graph.collectives)
    return frozenset(name for name, c in issued if c is not None and not c.is_far)


def _pinned(graph: Graph, exchanged: Container[str]) -> Graph:
    nodes = tuple(_through_slots(n) if n.name in exchanged else n for n in graph.nodes)
    return replace(graph, nodes=nodes)


def _through_slots(node: Node) -> Node:
    by_torch = node.collective
    assert by_torch is not None
    pinned = THROUGH_SLOTS.collective(
        by_torch.kind, axis=by_torch.axis, num_ranks=by_torch.num_ranks,
        nbytes=by_torch.whole_bytes, stride=by_torch.stride,
    )  # fmt: skip
    return replace(node, collective=pinned)


# What the rule says is sent so.
STAGES, EXCHANGES = "stages", "exchanges"
_NEEDS = {
    STAGES: ("the messages of stages, and lays no stages", "[[shard_pipeline]] rules"),
    EXCHANGES: ("exchanges, and ranks do not share its batch or its tensors, or do so in stages",
                "[[shard_batch]] or [[shard_tensor]] rules and no [[shard_pipeline]]"),
}  # fmt: skip
