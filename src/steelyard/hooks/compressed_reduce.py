"""Gradients of several ranks added up in a code, by calls and not as nodes of a graph.

What is linear is all-reduced, as are thin factors; of all else, two ranks send each other their
codes, and of more each adds up a part. Not for who calls: see compress.py.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from steelyard.comm.gloo.direct_collectives import hand_round, put_together
from steelyard.ir.gradient_codec import BLOCK, Codec, blocks_of
from steelyard.operators import low_rank
from steelyard.operators.gradient_codecs import (
    decode_gradients,
    decode_sum,
    encode_gradients,
    encode_sum,
)


class CompressedReduce:
    """Over the ranks of ``group``, who call in the same order."""

    def __init__(self, codec: Codec, group: dist.ProcessGroup) -> None:
        self._codec, self._group = codec, group
        self._ranks, self._rank = group.size(), group.rank()

    def room(self, numel: int) -> int:
        """Elements that so many take, the last block and the last part filled up."""
        if self._codec.rank:
            return numel
        return blocks_of(numel, parts=self._parts) * BLOCK

    def of(self, tensors: Sequence[torch.Tensor], lost: torch.Tensor | None) -> torch.Tensor:
        """One behind the other, flat, the same bits on all ranks; ``lost`` is added, and what this
        rank's codes lose is left there."""
        name = self._codec.name
        if self._codec.is_linear:
            narrow = encode_gradients(tensors, None, name, 1)
            dist.all_reduce(narrow, group=self._group)
            return decode_gradients(narrow, name)
        coded = encode_gradients(tensors, lost, name, self._parts)
        if self._parts == 1:
            return decode_sum(self._gathered(coded), name)
        received = torch.empty_like(coded)
        hand_round(received, coded, self._group)
        added = encode_sum(received, own := self._own_part(lost), name)
        if lost is not None and own is not None:
            # What the sum loses here is this rank's to make up for.
            lost.chunk(self._parts)[self._rank].add_(own)
        return decode_gradients(self._gathered(added), name)

    def put_products(
        self,
        tensors: Sequence[torch.Tensor],
        lost: torch.Tensor,
        start: torch.Tensor,
        *,
        share: float,
    ) -> None:
        """In place of matrices their sums times ``share``, as products of factors; ``start`` are
        the right ones of the step before, and this step's are left there."""
        shapes, rank = [(len(x), x.numel() // len(x)) for x in tensors], self._codec.rank
        lefts = low_rank.left_factors(tensors, lost, start, shapes, rank)
        dist.all_reduce(lefts, group=self._group)
        rights = low_rank.right_factors(lefts, lost, shapes, rank)
        dist.all_reduce(rights, group=self._group)
        # Where it lies otherwise than in rows, as a convolution's may, there is no view of it.
        wholes = [
            x.view(shape) if x.is_contiguous() else x.new_empty(shape)
            for x, shape in zip(tensors, shapes, strict=True)
        ]
        low_rank.put_products(wholes, lefts, rights, start, shapes, rank, share=share)
        for x, whole in zip(tensors, wholes, strict=True):
            if not x.is_contiguous():
                x.copy_(whole.view(x.shape))

    def scattered(self, rows: torch.Tensor) -> torch.Tensor:
        """Of as many rows as there are ranks, the sum of this rank's, filled up to whole blocks."""
        numel = rows.shape[1]
        rest = rows.new_zeros(-numel % BLOCK)
        tensors = [piece for row in rows for piece in (row, rest)]
        coded = encode_gradients(tensors, None, self._codec.name, self._ranks)
        received = torch.empty_like(coded)
        hand_round(received, coded, self._group)
        return decode_sum(received, self._codec.name)

    @property
    def _parts(self) -> int:
        return 1 if self._ranks == 2 or self._codec.is_linear else self._ranks

    def _own_part(self, lost: torch.Tensor | None) -> torch.Tensor | None:
        return None if lost is None else lost.new_zeros(lost.numel() // self._parts)

    def _gathered(self, row: torch.Tensor) -> torch.Tensor:
        gathered = row.new_empty((self._ranks, row.shape[1]))
        put_together(gathered, row, self._group)
        return gathered
