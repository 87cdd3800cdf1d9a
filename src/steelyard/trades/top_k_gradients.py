"""Largest gradients: ranks that share the batch send each other a few of each block's elements.

Those that are largest, with their places, and what is left out is added to the next step's
(Aji and Heafield, EMNLP 2017; Lin et al., ICLR 2018), of each block by itself, so that all blocks
take as many bytes and nothing is sorted. Not for which gradients: see search/, nor for the
arithmetic: operators/gradient_codecs.py.
"""

from typing import ClassVar

from steelyard.passes.compression.compressed_gradients import CompressesGradients


class TopKGradients(CompressesGradients):
    """Pays computation, memory for what is left out until it is sent, and accuracy; buys
    communication."""

    name: ClassVar[str] = "top_k_gradients"
    pays: ClassVar[tuple[str, ...]] = ("computation", "memory", "accuracy")
    buys: ClassVar[tuple[str, ...]] = ("communication",)
    is_exact: ClassVar[bool] = False
    is_bitwise: ClassVar[bool] = False
