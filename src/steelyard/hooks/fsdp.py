"""A compressed reduce-scatter for FSDP2: each rank receives the compressed rows of its shard from
all other ranks.

No error feedback is kept between steps. Not for the compressed reductions: see
compressed_reduce.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from steelyard.errors import Mismatch, RunFailed
from steelyard.hooks.compressed_reduce import CompressedReduce
from steelyard.ir.gradient_codec import Codec


class CompressedReduceScatter:
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter``."""

    def __init__(self, codec: Codec) -> None:
        assert not codec.has_residual, "this codec has no residual"
        self._codec = codec

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if input_tensor.dtype != torch.float32:
            work: dist.Work | None = dist.reduce_scatter_single(
                output_tensor, input_tensor, op, group=group, async_op=async_op
            )
            return work
        ranks = group.size()
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise RunFailed(
                f"FSDP2 requested {op} of compressed gradients",
                expected="their sum or mean",
                remedy="remove set_gradient_divide_factor, or do not compress",
            )
        total = CompressedReduce(self._codec, group).scattered(input_tensor.view(ranks, -1))
        output_tensor.copy_(total[: output_tensor.numel()].view_as(output_tensor))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(ranks)
        return None

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        if state:
            raise Mismatch(
                f"the state holds residuals of {len(state)} parameters",
                expected="an empty state, because int8 has no residuals",
                remedy="load the state saved with the same model and codec",
            )
