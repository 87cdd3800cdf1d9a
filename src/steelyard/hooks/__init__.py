"""Gradients in few bits under DistributedDataParallel and FSDP2, for who wants that and no more.

    from steelyard.hooks import compress

    compress(ddp, "ternary")

Nothing is captured, planned or predicted here: a plan says whether codes pay, this only sends them.
Not for what codes are (core/codec.py), nor for Steelyard's own step (exchange/coded.py).
"""

from steelyard.hooks.asked import Lost, compress

__all__ = ["Lost", "compress"]
