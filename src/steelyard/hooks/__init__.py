"""Gradients in few bits under DistributedDataParallel and FSDP2, for who wants that and no more.

    from steelyard.hooks import compress

    compress(ddp, "ternary")

Nothing is captured, planned or predicted here: a plan says whether codes pay, this only sends them.
Not for what codes are (ir/gradient_codec.py), nor for Steelyard's own step
(passes/compression/compressed_all_reduce.py).
"""

from steelyard.hooks.registration import Lost, compress

__all__ = ["Lost", "compress"]
