"""Chooses among layouts of about equal speed: the layout with the fewest and mildest trades.

Not for the speed of a layout: see search/cluster/search.py. Not for mixes of blocks: see
search/cluster/policy_mixture.py.
"""

from collections.abc import Iterator
from dataclasses import replace

from steelyard.ir.model_blocks import ActivationPolicy
from steelyard.ir.parallel_layout import ParallelLayout

_TWICE, _THRICE = 2, 3
StagePolicies = tuple[tuple[tuple[ActivationPolicy, int], ...], ...]


def burden(layout: ParallelLayout, stages: StagePolicies) -> tuple[int, ...]:
    """Return a sort key that orders layouts of equal speed from simple to complex.

    Fewer trades come first; trades that need offload memory, or ranks that do different work,
    count more. Ties are broken by less offloading, less recompute, a lower ZeRO stage, fewer
    pipeline stages and tensor-parallel ranks, and fewer micro-batches.
    """
    counted = [pair for stage in stages for pair in stage]
    num_offloaded = sum(count for policy, count in counted if policy.is_offloaded)
    num_recomputed = sum(count for policy, count in counted if policy.recomputed)
    recomputed_calls = sum(count * len(policy.recomputed) for policy, count in counted)
    trades = (
        layout.data > 1,
        layout.state_stage > 0,
        layout.micro_batches > 1,
        num_recomputed > 0,
        _TWICE * (num_offloaded > 0),
        _TWICE * layout.offloads_state,
        _TWICE * (layout.tensor > 1),
        _THRICE * (layout.pipeline > 1),
    )
    return (
        sum(trades), layout.offloads_state, num_offloaded, num_recomputed, recomputed_calls,
        layout.state_stage, layout.pipeline, layout.tensor, layout.virtual, layout.micro_batches,
        layout.overlaps,
    )  # fmt: skip


def without_a_trade(
    layout: ParallelLayout, stages: StagePolicies
) -> Iterator[tuple[ParallelLayout, StagePolicies]]:
    """Yield the same blocks on the same ranks without one trade, or with a lower ZeRO stage."""
    if layout.offloads_state:
        yield replace(layout, offloads_state=False), stages
    policies = {policy for stage in stages for policy, _ in stage}
    if any(policy.is_offloaded for policy in policies):
        yield (
            layout,
            tuple(tuple((replace(f, is_offloaded=False), n) for f, n in s) for s in stages),
        )
    if any(policy.recomputed for policy in policies):
        yield layout, tuple(tuple((replace(f, recomputed=()), n) for f, n in s) for s in stages)
    for stage in range(layout.state_stage):
        # ZeRO stage 2 (sharded gradients) is only considered for one micro-batch: see
        # enumerate_layouts.py.
        if stage != 2 or layout.micro_batches == 1:
            yield replace(layout, state_stage=stage, overlaps=True), stages
