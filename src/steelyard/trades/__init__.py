"""What can be given for what: one file a trade, each with its offers, rewrite and enactment.
Not for prices, and not for what two trades share: that is exchange."""

from steelyard.plans.trade import Trade
from steelyard.trades.accumulate import Accumulate
from steelyard.trades.chunk import Chunk
from steelyard.trades.low_rank_gradients import LowRankGradients
from steelyard.trades.offload import Offload
from steelyard.trades.offload_state import OffloadState
from steelyard.trades.overlap import Overlap
from steelyard.trades.quantize_activations import QuantizeActivations
from steelyard.trades.quantized_gradients import QuantizedGradients
from steelyard.trades.recompute import Recompute
from steelyard.trades.shard_batch import ShardBatch
from steelyard.trades.shard_pipeline import ShardPipeline
from steelyard.trades.shard_states import ShardStates
from steelyard.trades.shard_tensor import ShardTensor
from steelyard.trades.shared_memory_transfer import SharedMemoryTransfer
from steelyard.trades.sparse_gradients import SparseGradients
from steelyard.trades.ternary_gradients import TernaryGradients
from steelyard.trades.top_k_gradients import TopKGradients

__all__ = ["TRADES"]

# In the order they are applied: what changes the graph comes before what only reorders it.
TRADES: tuple[Trade, ...] = (
    Accumulate(), ShardTensor(), Chunk(), ShardStates(), ShardBatch(), SparseGradients(),
    QuantizedGradients(), TernaryGradients(), LowRankGradients(), TopKGradients(), Overlap(),
    Recompute(), QuantizeActivations(), Offload(), OffloadState(), ShardPipeline(),
    SharedMemoryTransfer(),
)  # fmt: skip
