"""Trades, one file each: its offers, its rewrite of a program, its table in a plan file.

Not for prices: see predict/. Not for rewrites that several trades share: see passes/.
"""

from steelyard.plans.trade import Trade
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

__all__ = ["BY_NAME", "TRADES"]

# In the order of application: trades that change the graph come before those that only reorder it.
TRADES: tuple[Trade, ...] = (
    Accumulate(), ShardTensor(), Chunk(), ShardStates(), ShardBatch(), SparseGradients(),
    QuantizedGradients(), TernaryGradients(), LowRankGradients(), TopKGradients(), Overlap(),
    Recompute(), QuantizeActivations(), Offload(), OffloadState(), ShardPipeline(),
    SharedMemoryTransfer(),
)  # fmt: skip
BY_NAME = {trade.name: trade for trade in TRADES}
