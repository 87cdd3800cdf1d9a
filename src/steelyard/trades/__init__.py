"""Trades, one file each: its offers, its rewrite of a program, its table in a plan file.

Not for prices: see predict/. Not for rewrites that several trades share: see passes/.
"""

import difflib

from steelyard.errors import BadInput
from steelyard.plans.trade import Trade
from steelyard.safe_text import printable
from steelyard.trades.accumulate import Accumulate
from steelyard.trades.chunk import Chunk
from steelyard.trades.gradient_compression import (
    LowRankGradients,
    QuantizedGradients,
    TernaryGradients,
    TopKGradients,
)
from steelyard.trades.offload import Offload
from steelyard.trades.offload_state import OffloadState
from steelyard.trades.overlap import Overlap
from steelyard.trades.quantize_activations import QuantizeActivations
from steelyard.trades.recompute import Recompute
from steelyard.trades.shard_batch import ShardBatch
from steelyard.trades.shard_pipeline import ShardPipeline
from steelyard.trades.shard_states import ShardStates
from steelyard.trades.shard_tensor import ShardTensor
from steelyard.trades.shared_memory_transfer import SharedMemoryTransfer
from steelyard.trades.sparse_gradients import SparseGradients

__all__ = ["BY_NAME", "TRADES", "check_trade"]

# In the order of application: trades that change the graph come before those that only reorder it.
TRADES: tuple[Trade, ...] = (
    Accumulate(), ShardTensor(), Chunk(), ShardStates(), ShardBatch(), SparseGradients(),
    QuantizedGradients(), TernaryGradients(), LowRankGradients(), TopKGradients(), Overlap(),
    Recompute(), QuantizeActivations(), Offload(), OffloadState(), ShardPipeline(),
    SharedMemoryTransfer(),
)  # fmt: skip
BY_NAME = {trade.name: trade for trade in TRADES}


def check_trade(name: str) -> None:
    """Raise BadInput for an unknown trade; needs no torch."""
    if name not in BY_NAME:
        close = difflib.get_close_matches(str(name)[:80], BY_NAME, n=1)
        raise BadInput(
            f"unknown trade {printable(repr(name), most=60)}"
            + (f"; did you mean {close[0]}?" if close else ""),
            expected=f"the name of a trade, such as {(*close, Recompute.name)[0]}",
            remedy="see docs/trades for all trades",
        )
