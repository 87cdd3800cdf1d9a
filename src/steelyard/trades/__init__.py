"""What can be given for what: one file a trade, each with its offers, rewrite and enactment.
Not for prices, and not for what two trades share: that is exchange."""

from steelyard.plans.trade import Trade
from steelyard.trades.accumulate import Accumulate
from steelyard.trades.largest_gradients import LargestGradients
from steelyard.trades.low_rank_gradients import LowRankGradients
from steelyard.trades.offload import Offload
from steelyard.trades.offload_state import OffloadState
from steelyard.trades.overlap import Overlap
from steelyard.trades.pinned_transfer import PinnedTransfer
from steelyard.trades.quantise import Quantise
from steelyard.trades.recompute import Recompute
from steelyard.trades.rounded_gradients import RoundedGradients
from steelyard.trades.shard_batch import ShardBatch
from steelyard.trades.shard_pipeline import ShardPipeline
from steelyard.trades.shard_states import ShardStates
from steelyard.trades.shard_tensor import ShardTensor
from steelyard.trades.sparse_gradients import SparseGradients
from steelyard.trades.stream import Stream
from steelyard.trades.ternary_gradients import TernaryGradients

__all__ = ["TRADES"]

# In the order they are applied: what changes the graph comes before what only reorders it.
TRADES: tuple[Trade, ...] = (
    Accumulate(), ShardTensor(), Stream(), ShardStates(), ShardBatch(), SparseGradients(),
    RoundedGradients(), TernaryGradients(), LowRankGradients(), LargestGradients(), Overlap(),
    Recompute(), Quantise(), Offload(), OffloadState(), ShardPipeline(), PinnedTransfer(),
)  # fmt: skip
