"""The choice among layouts of about equal speed: the one with the fewest and mildest trades.

Not for the speed of a layout: see search/cluster/search.py. Not for mixes of blocks: see
search/cluster/policy_mixture.py.
"""

from collections.abc import Iterator
from dataclasses import replace

from steelyard.ir.cluster_layout import ClusterLayout
from steelyard.search.cluster.stage_assignment import ActivationPolicy

_TWICE, _THRICE = 2, 3
StagePolicies = tuple[tuple[tuple[ActivationPolicy, int], ...], ...]


def burden(layout: ClusterLayout, stages: StagePolicies) -> tuple[int, ...]:
    """Return a sort key that orders layouts of equal speed from simple to complex.

    Fewer trades come first; trades that need offload memory, or ranks that do different work,
    count more. Ties are broken by less offloading, less recompute, a lower ZeRO stage, fewer
    pipeline stages and tensor-parallel ranks, and fewer micro-batches.
    """
    counted = [pair for stage in stages for pair in stage]
    num_offloaded = sum(count for policy, count in counted if policy.moved)
    num_recomputed = sum(count for policy, count in counted if policy.again)
    recomputed_calls = sum(count * len(policy.again) for policy, count in counted)
    trades = (
        layout.data > 1,
        layout.state_stage > 0,
        layout.micro_batches > 1,
        num_recomputed > 0,
        _TWICE * (num_offloaded > 0),
        _TWICE * layout.far_states,
        _TWICE * (layout.tensor > 1),
        _THRICE * (layout.pipeline > 1),
    )
    return (
        sum(trades), layout.far_states, num_offloaded, num_recomputed, recomputed_calls,
        layout.state_stage, layout.pipeline, layout.tensor, layout.virtual, layout.micro_batches,
        layout.overlaps,
    )  # fmt: skip


def without_a_trade(
    layout: ClusterLayout, stages: StagePolicies
) -> Iterator[tuple[ClusterLayout, StagePolicies]]:
    """Yield the same blocks on the same ranks without one trade, or with a lower ZeRO stage."""
    if layout.far_states:
        yield replace(layout, far_states=False), stages
    policies = {policy for stage in stages for policy, _ in stage}
    if any(policy.moved for policy in policies):
        yield layout, tuple(tuple((replace(f, moved=False), n) for f, n in s) for s in stages)
    if any(policy.again for policy in policies):
        yield layout, tuple(tuple((replace(f, again=()), n) for f, n in s) for s in stages)
    for stage in range(layout.state_stage):
        # ZeRO stage 2 (sharded gradients) is only considered for one micro-batch: see
        # search/cluster/enumerate_layouts.py.
        if stage != 2 or layout.micro_batches == 1:
            yield replace(layout, state_stage=stage, overlaps=True), stages
