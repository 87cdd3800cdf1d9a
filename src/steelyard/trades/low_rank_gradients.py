"""Gradients of low rank: ranks that share the batch send two thin factors of each matrix.

PowerSGD's linear form (Vogels et al., NeurIPS 2019): one turn of power iteration a step, begun with
the factor of the step before; both factors are all-reduced, and what their product leaves of a
gradient is added to the next. Not for which gradients: see search/, nor for the arithmetic:
operators/low_rank.py.
"""

from typing import ClassVar

from steelyard.passes.compression.compressed_gradients import CompressesGradients


class LowRankGradients(CompressesGradients):
    """Pays computation, memory for what is left until it is made up for, and accuracy; buys
    communication."""

    name: ClassVar[str] = "low_rank_gradients"
    pays: ClassVar[tuple[str, ...]] = ("computation", "memory", "accuracy")
    buys: ClassVar[tuple[str, ...]] = ("communication",)
    is_exact: ClassVar[bool] = False
    is_bitwise: ClassVar[bool] = False
