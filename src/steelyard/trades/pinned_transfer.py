"""Pinned transfer: stages of one host hand their messages on through memory that they share.

What a step sends between stages has the same shape every time. So whoever reads it makes room once,
and whoever sends it writes it there: no copy through a connection on either side, and no room made
in any step. Fixed slots ahead of the transfer are the mechanism of Xue et al. (EuroSys 2019), there
over RDMA. Not for the slots themselves: see exchange/pinned.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from steelyard.core.errors import Mismatch
from steelyard.core.program import Program
from steelyard.core.rules import Rule
from steelyard.core.source import Source
from steelyard.core.trade import Offer, Refusal


class PinnedTransfer:
    """Pays memory, buys communication."""

    name: ClassVar[str] = "pinned_transfer"
    pays: ClassVar[tuple[str, ...]] = ("memory",)
    buys: ClassVar[tuple[str, ...]] = ("communication",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = True

    def offers(
        self,
        program: Program,
        source: Source,  # noqa: ARG002 - the stages say what is sent
    ) -> tuple[tuple[Offer, ...], tuple[Refusal, ...]]:
        if program.pipeline is None:
            return (), ()
        offer = Offer(
            trade=self.name,
            label="messages of stages through shared memory",
            rules=(Rule(trade=self.name, op=STAGES),),
        )
        return (offer,), ()

    def rewrite(
        self,
        program: Program,
        rules: Sequence[Rule],
        source: Source,  # noqa: ARG002 - the program says what is sent
    ) -> Program:
        if not rules:
            return program
        if program.pipeline is None:
            raise Mismatch(
                "the plan has pinned_transfer for the messages of stages, and lays no stages",
                expected="[[shard_pipeline]] rules beside it",
                remedy="take the pinned_transfer rule out of the plan, or plan again",
            )
        return replace(program, pipeline=replace(program.pipeline, is_pinned=True))


# What the rule says is sent so.
STAGES = "stages"
