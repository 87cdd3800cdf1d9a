"""Sparse gradients: ranks exchange only the looked-up rows of an embedding's gradient.

The gradient is zero in all other rows, so the rows of all ranks and their indices contain all of
it. The sum is the same, in another order (Parallax: Kim et al., EuroSys 2019). Not for dense
gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from steelyard.errors import Mismatch
from steelyard.ir.optimizer_update import WEIGHT, parameters_named
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.rule_kinds import SparseRows
from steelyard.ir.step_source import StepSource
from steelyard.passes.data_parallel.sparse_embedding_grads import Table, in_rows, tables
from steelyard.plans.trade import Offer, Rejection, Remaining


@dataclass(frozen=True, kw_only=True)
class SparseGradientsRule(SparseRows):
    """``[[sparse_gradients]]``: an embedding whose gradient is sent as the rows that were looked
    up.
    """

    trade: str = field(init=False, default="sparse_gradients")

    def describe(self) -> str:
        return f"{self.parameter} ({self.count}) as {self.format}"


class SparseGradients:
    """Pays computation and memory, buys communication."""

    name: ClassVar[str] = SparseGradientsRule.trade
    pays: ClassVar[tuple[str, ...]] = ("computation", "memory")
    buys: ClassVar[tuple[str, ...]] = ("communication",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    rule: ClassVar[type[Rule]] = SparseGradientsRule

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - the program says what is exchanged
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        ranks = program.layout.data
        if ranks == 1:
            return (), ()
        offers, refusals = [], []
        for table in tables(program.graph):
            name = table.target.removeprefix(WEIGHT)
            if reason := table.why_whole or _why_not_fewer(table, ranks):
                refusals.append(
                    Rejection(
                        trade=self.name,
                        label=f"rows of {name}",
                        reason=reason,
                        left=Remaining.NEVER,
                    )
                )
            else:
                label = f"{table.looked_up} rows of {name}, which has {table.num_rows}"
                rule = SparseGradientsRule(parameter=name)
                offers.append(Offer(trade=self.name, label=label, rules=(rule,)))
        return tuple(offers), tuple(refusals)

    def rewrite(
        self, program: Program, rules: Sequence[SparseGradientsRule], source: StepSource
    ) -> Program:
        if not rules:
            return program
        assert not program.recomputed, "sparse gradients are applied before recompute"
        layout = program.layout
        if layout.data == 1 or layout.pipeline > 1 or layout.tensor > 1 or layout.shares:
            raise Mismatch(
                "the plan sends sparse gradients (sparse_gradients)",
                expected="ranks that share only the batch, in equal shares",
                remedy="remove the sparse_gradients rules from the plan, or plan again",
            )
        possible = {t.target for t in tables(program.graph) if not t.why_whole}
        named = [name for rule in rules for name in parameters_named(program.graph, rule)]
        if unsupported := sorted(set(named) - possible):
            raise Mismatch(
                f"the plan sends rows of the gradient of {unsupported[0].removeprefix(WEIGHT)}",
                expected="a table that is read only by one lookup, in one micro-batch",
                remedy="remove it from the sparse_gradients rules, or plan again",
            )
        graph = in_rows(program.graph, named, num_ranks=layout.data, transport=source.transport)
        return program.with_graph(source.rewritten(graph))


def _why_not_fewer(table: Table, ranks: int) -> str:
    """Return why sending rows would not send fewer bytes; empty if it would.

    A ring all-reduce sends twice the tensor, minus one rank's share of each round.
    """
    row_bytes_sent = (ranks - 1) * table.looked_up * table.row_bytes
    ring_bytes = 2 * (ranks - 1) / ranks * table.num_rows * table.row_bytes
    if row_bytes_sent < ring_bytes:
        return ""
    return (
        f"{ranks} ranks look up {table.looked_up} rows each, and the table has only "
        f"{table.num_rows}"
    )
