"""Gradients of low rank: ranks that share the batch send two thin factors of each matrix.

PowerSGD's linear form (Vogels et al., NeurIPS 2019): one turn of power iteration a step, begun with
the factor of the step before; both factors are all-reduced, and what their product leaves of a
gradient is added to the next. Not for which gradients: see search/, nor for the arithmetic:
operators/low_rank.py.
"""

from collections.abc import Sequence
from typing import ClassVar

from steelyard.core.program import Program
from steelyard.core.rules import Rule
from steelyard.core.source import Source
from steelyard.core.trade import Offer, Refusal
from steelyard.exchange.codings import offers_in, with_codes


class LowRankGradients:
    """Pays computation, memory for what is left until it is made up for, and accuracy; buys
    communication."""

    name: ClassVar[str] = "low_rank_gradients"
    pays: ClassVar[tuple[str, ...]] = ("computation", "memory", "accuracy")
    buys: ClassVar[tuple[str, ...]] = ("communication",)
    is_exact: ClassVar[bool] = False
    is_bitwise: ClassVar[bool] = False

    def offers(
        self,
        program: Program,
        source: Source,  # noqa: ARG002 - the program says what is exchanged
    ) -> tuple[tuple[Offer, ...], tuple[Refusal, ...]]:
        return offers_in(self.name, program)

    def rewrite(
        self,
        program: Program,
        rules: Sequence[Rule],
        source: Source,
    ) -> Program:
        return with_codes(program, rules, source)
