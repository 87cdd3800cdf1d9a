"""Gradient compression as communication hooks for DistributedDataParallel and FSDP2.

    from steelyard.hooks import compress

    compress(ddp, "ternary")

Nothing is captured, planned or predicted here: a plan says whether compression pays, and these
hooks only apply it. Not for the codecs themselves (ir/gradient_codec.py) or for Steelyard's own
training step (passes/compression/compressed_all_reduce.py).
"""

from steelyard import _torch  # noqa: F401 - first: it refuses a torch that is not supported
from steelyard.hooks.registration import Lost, compress

__all__ = ["Lost", "compress"]
