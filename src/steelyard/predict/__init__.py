"""The predictor: turns a program and the costs of its operators into the predicted step.

Not for measuring or deciding. The search scores plans with it, and receipts compare measurements
with it.
"""

from steelyard.predict.collectives.curves import collective_curves
from steelyard.predict.lifetimes import memory_history
from steelyard.predict.pipeline.messages import message_of
from steelyard.predict.pipeline.step import pipelined
from steelyard.predict.slowdown import slowdown
from steelyard.predict.step import (
    kept_gradients_bytes,
    least_possible_bytes,
    micro_batch_overhead,
    peak_bytes,
    predict,
    rank_peak_bytes,
    step_seconds,
)
from steelyard.predict.trace import spans
from steelyard.predict.unequal_ranks import rank_seconds

__all__ = [
    "collective_curves",
    "kept_gradients_bytes",
    "least_possible_bytes",
    "memory_history",
    "message_of",
    "micro_batch_overhead",
    "peak_bytes",
    "pipelined",
    "predict",
    "rank_peak_bytes",
    "rank_seconds",
    "slowdown",
    "spans",
    "step_seconds",
]
