"""Ternary gradients: ranks that share the batch send each other -1, 0 or 1 times a scale.

TernGrad's trade (Wen et al., NIPS 2017), with two bits on the wire: a scale for each block, the
nearest of the three, and what that loses added to the next step's (Seide et al., Interspeech 2014;
Karimireddy et al., ICML 2019). Not for which gradients: see search/, nor for the arithmetic:
operators/gradient_codecs.py.
"""

from typing import ClassVar

from steelyard.passes.compression.compressed_gradients import CompressesGradients


class TernaryGradients(CompressesGradients):
    """Pays computation, memory for what is lost until it is made up for, and accuracy; buys
    communication."""

    name: ClassVar[str] = "ternary_gradients"
    pays: ClassVar[tuple[str, ...]] = ("computation", "memory", "accuracy")
    buys: ClassVar[tuple[str, ...]] = ("communication",)
    is_exact: ClassVar[bool] = False
    is_bitwise: ClassVar[bool] = False
