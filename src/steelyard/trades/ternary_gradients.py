"""Ternary gradients: ranks that share the batch send each other -1, 0 or 1 times a scale.

TernGrad's trade (Wen et al., NIPS 2017), with two bits on the wire: a scale for each block, the
nearest of the three, and what that loses added to the next step's (Seide et al., Interspeech 2014;
Karimireddy et al., ICML 2019). Not for which gradients: see search/, nor for the arithmetic:
operators/codes.py.
"""

from collections.abc import Sequence
from typing import ClassVar

from steelyard.core.program import Program
from steelyard.core.rules import Rule
from steelyard.core.source import Source
from steelyard.core.trade import Offer, Refusal
from steelyard.exchange.codings import offers_in, with_codes


class TernaryGradients:
    """Pays computation, memory for what is lost until it is made up for, and accuracy; buys
    communication."""

    name: ClassVar[str] = "ternary_gradients"
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
