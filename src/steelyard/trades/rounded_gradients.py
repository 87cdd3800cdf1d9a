"""Rounded gradients: ranks that share the batch send each other gradients in 16 bits, or in 8.

In 16 bits they are all-reduced in bfloat16. Those of 8 bits are multiples of a scale for each
block, summed in float32 behind an all-to-all where there are more than two ranks (as in ZeRO++,
Wang et al., ICLR 2024). Not for which gradients: see search/, nor for the arithmetic:
operators/codes.py.
"""

from collections.abc import Sequence
from typing import ClassVar

from steelyard.core.program import Program
from steelyard.core.rules import Rule
from steelyard.core.source import Source
from steelyard.core.trade import Offer, Refusal
from steelyard.exchange.codings import offers_in, with_codes


class RoundedGradients:
    """Pays computation and accuracy, buys communication."""

    name: ClassVar[str] = "rounded_gradients"
    pays: ClassVar[tuple[str, ...]] = ("computation", "accuracy")
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
