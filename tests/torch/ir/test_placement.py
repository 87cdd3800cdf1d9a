"""Shards of tensors, followed through views, and cut as torch cuts them."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.ir.graph import Tensor
from steelyard.ir.placement import REPLICATE, Shard, fits, local_tensor, seen_through
from tests.support.in_step import cut

_SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4).map(tuple)


@given(shape=_SIZES, viewed=_SIZES, dim=st.integers(0, 3), groups=st.sampled_from([1, 2, 3]))
def test_a_shard_of_a_view_is_the_view_of_the_shard(
    shape: tuple[int, ...], viewed: tuple[int, ...], dim: int, groups: int
) -> None:
    count = math.prod(shape)
    viewed = (*viewed, count // math.prod(viewed)) if count % math.prod(viewed) == 0 else (count,)
    whole = torch.arange(count).view(shape)
    shard = Shard(dim % len(shape), groups)
    for num_ranks in (2, 3):
        if not fits(_tensor(whole), shard, num_ranks):
            continue
        seen = seen_through(shape, viewed, shard, num_ranks)
        ours = [cut(whole, shard, rank, num_ranks).flatten() for rank in range(num_ranks)]
        if seen is not None:
            assert fits(_tensor(whole.view(viewed)), seen, num_ranks)
            for rank in range(num_ranks):
                theirs = cut(whole.view(viewed), seen, rank, num_ranks)
                assert torch.equal(theirs.flatten(), ours[rank])
        else:
            for other in range(len(viewed)):
                for parts in range(1, count + 1):
                    found = Shard(other, parts)
                    if fits(_tensor(whole.view(viewed)), found, num_ranks):
                        first = cut(whole.view(viewed), found, 0, num_ranks)
                        assert not torch.equal(first.flatten(), ours[0])


@given(shape=_SIZES, order=st.permutations(range(4)), dim=st.integers(0, 3))
def test_a_shard_is_dense_in_the_dim_order_of_the_whole(
    shape: tuple[int, ...], order: list[int], dim: int
) -> None:
    order = [d for d in order if d < len(shape)]
    whole = torch.empty([shape[d] for d in order]).permute(
        [order.index(d) for d in range(len(shape))]
    )
    shard = Shard(dim % len(shape))
    if not fits(_tensor(whole), shard, 2):
        return
    part = local_tensor(_tensor(whole), shard, 2)
    real = whole.narrow(shard.dim, 0, whole.shape[shard.dim] // 2)
    assert part.shape == real.shape
    strides = zip(part.shape, part.stride, torch.empty_like(real).stride(), strict=True)
    assert all(ours == theirs for size, ours, theirs in strides if size > 1)
    assert local_tensor(_tensor(whole), REPLICATE, 2) == _tensor(whole)


def _tensor(real: torch.Tensor) -> Tensor:
    return Tensor(shape=tuple(real.shape), stride=real.stride(), dtype="float32", storage=0)
