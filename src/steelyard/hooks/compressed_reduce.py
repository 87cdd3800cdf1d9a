"""Compressed reductions of gradients over ranks, as function calls instead of graph nodes.

Linear codecs and low-rank factors are all-reduced. With other codecs, two ranks exchange their
codes directly; if there are more ranks, each one reduces a part. Not for the hooks that call this:
see ddp.py and fsdp.py.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from steelyard.comm.gloo.direct_collectives import all_gather_into, all_to_all_into
from steelyard.ir.gradient_codec import BLOCK, Codec, blocks_of
from steelyard.operators import low_rank
from steelyard.operators.gradient_codecs import (
    decode_gradients,
    decode_sum,
    encode_gradients,
    encode_sum,
)


class CompressedReduce:
    """Compressed reductions over ``group``, whose ranks must call in the same order."""

    def __init__(self, codec: Codec, group: dist.ProcessGroup) -> None:
        self._codec, self._group = codec, group
        self._ranks, self._rank = group.size(), group.rank()

    def room(self, numel: int) -> int:
        """Return how many elements ``numel`` elements become once the last block and the last part
        are padded.
        """
        if self._codec.rank:
            return numel
        return blocks_of(numel, parts=self._parts) * BLOCK

    def of(self, tensors: Sequence[torch.Tensor], lost: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of the tensors over the ranks, concatenated and flat, with the same bits
        on all ranks. The residuals in ``lost`` are added before compression, and replaced by this
        rank's compression error.
        """
        name = self._codec.name
        if self._codec.is_linear:
            encoded = encode_gradients(tensors, None, name, 1)
            dist.all_reduce(encoded, group=self._group)
            return decode_gradients(encoded, name)
        coded = encode_gradients(tensors, lost, name, self._parts)
        if self._parts == 1:
            return decode_sum(self._all_gather(coded), name)
        received = torch.empty_like(coded)
        all_to_all_into(received, coded, self._group)
        reduced = encode_sum(received, own_error := self._empty_part(lost), name)
        if lost is not None and own_error is not None:
            # Error feedback: this rank also compensates the error of compressing the sum.
            lost.chunk(self._parts)[self._rank].add_(own_error)
        return decode_gradients(self._all_gather(reduced), name)

    def put_products(
        self,
        tensors: Sequence[torch.Tensor],
        lost: torch.Tensor,
        start: torch.Tensor,
        *,
        share: float,
    ) -> None:
        """Replace matrices by their sums times ``share``, as products of low-rank factors.
        ``start`` holds the right factors of the previous step and receives this step's."""
        shapes, rank = [(len(x), x.numel() // len(x)) for x in tensors], self._codec.rank
        lefts = low_rank.left_factors(tensors, lost, start, shapes, rank)
        dist.all_reduce(lefts, group=self._group)
        rights = low_rank.right_factors(lefts, lost, shapes, rank)
        dist.all_reduce(rights, group=self._group)
        # A tensor that is not contiguous, such as a channels-last convolution weight, has no view
        # of this shape.
        matrices = [
            x.view(shape) if x.is_contiguous() else x.new_empty(shape)
            for x, shape in zip(tensors, shapes, strict=True)
        ]
        low_rank.put_products(matrices, lefts, rights, start, shapes, rank, share=share)
        for x, matrix in zip(tensors, matrices, strict=True):
            if not x.is_contiguous():
                x.copy_(matrix.view(x.shape))

    def scattered(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's row of the sum over all ranks, padded to whole blocks. ``rows`` has
        one row for each rank.
        """
        numel = rows.shape[1]
        padding = rows.new_zeros(-numel % BLOCK)
        tensors = [piece for row in rows for piece in (row, padding)]
        coded = encode_gradients(tensors, None, self._codec.name, self._ranks)
        received = torch.empty_like(coded)
        all_to_all_into(received, coded, self._group)
        return decode_sum(received, self._codec.name)

    @property
    def _parts(self) -> int:
        return 1 if self._ranks == 2 or self._codec.is_linear else self._ranks

    def _empty_part(self, lost: torch.Tensor | None) -> torch.Tensor | None:
        return None if lost is None else lost.new_zeros(lost.numel() // self._parts)

    def _all_gather(self, row: torch.Tensor) -> torch.Tensor:
        gathered = row.new_empty((self._ranks, row.shape[1]))
        all_gather_into(gathered, row, self._group)
        return gathered
