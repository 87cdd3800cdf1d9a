"""The choice among layouts that are about as fast: the one with the fewest and mildest trades.

Not for how fast a layout is: see search/cluster/search.py. Not for mixes of blocks: see
search/cluster/policy_mixture.py.
"""

from collections.abc import Iterator
from dataclasses import replace

from steelyard.ir.cluster_layout import ClusterLayout
from steelyard.search.cluster.stage_assignment import ActivationPolicy

_TWICE, _THRICE = 2, 3
Fates = tuple[tuple[tuple[ActivationPolicy, int], ...], ...]


def burden(layout: ClusterLayout, stages: Fates) -> tuple[int, ...]:
    """The simpler layout comes first: fewer trades, of which those that need a second memory, or
    ranks that do not all do the same, count more; then less that is offloaded, less that is
    recomputed, a lower ZeRO stage, fewer pipeline stages and tensor-parallel ranks, fewer
    micro-batches."""
    counted = [pair for stage in stages for pair in stage]
    num_moved = sum(count for fate, count in counted if fate.moved)
    num_again = sum(count for fate, count in counted if fate.again)
    calls_again = sum(count * len(fate.again) for fate, count in counted)
    trades = (
        layout.data > 1,
        layout.state_stage > 0,
        layout.micro_batches > 1,
        num_again > 0,
        _TWICE * (num_moved > 0),
        _TWICE * layout.far_states,
        _TWICE * (layout.tensor > 1),
        _THRICE * (layout.pipeline > 1),
    )
    return (
        sum(trades), layout.far_states, num_moved, num_again, calls_again, layout.state_stage,
        layout.pipeline, layout.tensor, layout.virtual, layout.micro_batches, layout.overlaps,
    )  # fmt: skip


def without_a_trade(layout: ClusterLayout, stages: Fates) -> Iterator[tuple[ClusterLayout, Fates]]:
    """The same blocks on the same ranks without one of the trades, or with a lower ZeRO stage."""
    if layout.far_states:
        yield replace(layout, far_states=False), stages
    fates = {fate for stage in stages for fate, _ in stage}
    if any(fate.moved for fate in fates):
        yield layout, tuple(tuple((replace(f, moved=False), n) for f, n in s) for s in stages)
    if any(fate.again for fate in fates):
        yield layout, tuple(tuple((replace(f, again=()), n) for f, n in s) for s in stages)
    for stage in range(layout.state_stage):
        # Gradients in shares are weighed for one micro-batch alone, see
        # search/cluster/enumerate_layouts.py.
        if stage != 2 or layout.micro_batches == 1:
            yield replace(layout, state_stage=stage, overlaps=True), stages
