"""Rounded gradients: ranks that share the batch send each other gradients in 16 bits, or in 8.

In 16 bits they are all-reduced in bfloat16. Those of 8 bits are multiples of a scale for each
block, summed in float32 behind an all-to-all where there are more than two ranks (as in ZeRO++,
Wang et al., ICLR 2024). Not for which gradients: see search/, nor for the arithmetic:
operators/gradient_codecs.py.
"""

from typing import ClassVar

from steelyard.passes.compression.compressed_gradients import CompressesGradients


class QuantizedGradients(CompressesGradients):
    """Pays computation and accuracy, buys communication."""

    name: ClassVar[str] = "quantized_gradients"
    pays: ClassVar[tuple[str, ...]] = ("computation", "accuracy")
    buys: ClassVar[tuple[str, ...]] = ("communication",)
    is_exact: ClassVar[bool] = False
    is_bitwise: ClassVar[bool] = False
