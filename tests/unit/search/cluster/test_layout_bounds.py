"""No plan of random sections is predicted to be faster than the lower bounds of its layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.hardware.cluster import Cluster
from steelyard.hardware.cluster_file import decode_tree
from steelyard.ir.model_blocks import MIXED, SAVE_ALL, ActivationPolicy
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.predict.analytic.offload import with_offload
from steelyard.predict.analytic.sections import Section, Sections
from steelyard.predict.analytic.step import LayoutCost, StageBlocks, analytic_step
from steelyard.search.cluster.layout_bounds import least_peak_bytes, least_step_seconds
from steelyard.search.cluster.stage_assignment import StageAssignment

_CLUSTER = Cluster(
    tree=decode_tree("""
[device.d]
memory = "16 GiB"
memory_bandwidth = "900 GB/s"
peak = { float32 = "15 TFLOP/s" }
host_memory = "1 GiB"
host_link = "h"
[link.h]
rate = "1 GB/s"
latency = "10 us"
[link.l]
rate = "25 GB/s"
latency = "5 us"
[scope.cluster]
members = { d = 16 }
link = "l"
""")
)
_SECONDS, _BYTES = st.integers(1, 30).map(lambda n: n / 1000), st.integers(0, 40_000_000)
Kind = tuple[ActivationPolicy, Section]


@st.composite
def _sections(draw: st.DrawFn, name: str) -> Section:
    saved = draw(_BYTES)
    return Section(
        forward_seconds=draw(_SECONDS),
        backward_seconds=draw(_SECONDS),
        recompute_seconds=0.0,
        exchange_seconds=0.0,
        exchanged_bytes=0,
        flops=0,
        saved_bytes=saved,
        recompute_bytes=0,
        peak_bytes=saved + draw(_BYTES),
        parameters=((name, draw(st.integers(1, 1_000_000))),),
    )


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[ParallelLayout, int]:
    """Return a layout and its number of blocks, often with few micro-batches."""
    stages, data = draw(st.integers(1, 8)), draw(st.sampled_from((1, 2)))
    virtual = draw(st.sampled_from((1, 1, 1, 2))) if stages > 1 else 1
    micro_batches = draw(st.integers(1, 12)) if virtual == 1 else stages * draw(st.integers(1, 2))
    state_stage = draw(st.sampled_from((0, 1, 3))) if data > 1 else 0
    layout = ParallelLayout(
        pipeline=stages,
        data=data,
        micro_batches=micro_batches,
        virtual=virtual,
        state_stage=state_stage,
        overlaps=data > 1 and state_stage < 3,
    )
    blocks = stages * virtual * draw(st.integers(1, 2)) if virtual > 1 else None
    return layout, blocks or draw(st.integers(stages, 3 * stages + 2))


def _slower(section: Section, factor: float) -> Section:
    return replace(
        section,
        forward_seconds=factor * section.forward_seconds,
        recompute_seconds=factor * section.recompute_seconds,
        backward_seconds=factor * section.backward_seconds,
    )


@st.composite
def _kinds(draw: st.DrawFn, block: Section) -> list[Section]:
    """Return the block without a trade, recomputed, offloaded, and both."""
    saved = draw(st.integers(0, block.saved_bytes))
    recomputed = replace(
        block,
        recompute_seconds=draw(_SECONDS),
        saved_bytes=saved,
        recompute_bytes=block.saved_bytes - saved,
    )
    link = _CLUSTER.device.host_link
    assert link is not None
    return [block, recomputed, with_offload(block, link), with_offload(recomputed, link)]


@st.composite
def _counts(draw: st.DrawFn, layout: ParallelLayout, blocks: int) -> list[int]:
    if layout.virtual > 1:
        return [blocks // layout.pipeline] * layout.pipeline
    size = layout.pipeline - 1
    ends = st.lists(st.integers(1, blocks - 1), min_size=size, max_size=size, unique=True)
    cuts = [0, *sorted(draw(ends) if size else []), blocks]
    return [b - a for a, b in pairwise(cuts)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_assignment_is_faster_or_smaller_than_the_bounds_of_its_layout(
    data: st.DataObject,
) -> None:
    layout, blocks = data.draw(_layouts())
    parts = Sections(
        before=data.draw(_sections("before")),
        block=data.draw(_sections("block")),
        after=data.draw(_sections("after")),
        stream_bytes=data.draw(_BYTES),
    )
    kinds = data.draw(_kinds(parts.block))
    factors = 1.0, data.draw(st.sampled_from((1.0, 2.5)))
    kinds_of: dict[LayoutCost, list[Kind]] = {}
    for factor in factors:
        slower = replace(
            parts, **{name: _slower(getattr(parts, name), factor) for name in ("before", "after")}
        )
        own = [_slower(kind, factor) for kind in kinds]
        cost = LayoutCost(replace(slower, block=own[0]), _CLUSTER, layout, MIXED)
        policies = [SAVE_ALL, *(replace(SAVE_ALL, spared=(str(n),)) for n in range(1, len(own)))]
        kinds_of[cost] = list(zip(policies, own, strict=True))
    costs = [data.draw(st.sampled_from(list(kinds_of))) for _ in range(layout.pipeline)]
    stages = [
        StageBlocks(
            blocks=tuple((data.draw(st.sampled_from(kinds_of[cost]))[1], 1) for _ in range(count))
        )
        for cost, count in zip(costs, data.draw(_counts(layout, blocks)), strict=True)
    ]
    step = analytic_step(costs, stages)
    assert least_step_seconds(costs, blocks) <= step.step_seconds * (1 + 1e-9)
    assert min(least_peak_bytes(cost, blocks) for cost in costs) <= step.peak_bytes
    assigned = _assignment(costs, stages, blocks, kinds_of)
    bound = assigned.least_seconds()
    assert bound <= step.pipeline_seconds * (1 + 1e-9)
    found = assigned.stages()
    if found is not None:
        best = [StageBlocks(blocks=tuple((kind, n) for (_, kind), n in stage)) for stage in found]
        assert bound <= analytic_step(costs, best).pipeline_seconds * (1 + 1e-9)


def _plain_section(forward_seconds: float, backward_seconds: float) -> Section:
    return Section(
        forward_seconds=forward_seconds, backward_seconds=backward_seconds, recompute_seconds=0.0,
        exchange_seconds=0.0, exchanged_bytes=0, flops=0, saved_bytes=0, recompute_bytes=0,
        peak_bytes=0, parameters=(),
    )  # fmt: skip


def test_a_slower_block_with_a_faster_backward_pass_may_be_faster_in_an_early_stage() -> None:
    nothing, block, other = (_plain_section(*passes) for passes in ((0, 0), (1, 3), (2.2, 2)))
    parts = Sections(before=nothing, block=block, after=nothing, stream_bytes=0)
    costs = [LayoutCost(parts, _CLUSTER, ParallelLayout(pipeline=2, micro_batches=2), MIXED)] * 2
    stages = [StageBlocks(blocks=((other, 2),)), StageBlocks(blocks=((block, 1),))]
    kinds = [(SAVE_ALL, block), (replace(SAVE_ALL, spared=("1",)), other)]
    bound = _assignment(costs, stages, 3, {costs[0]: kinds}).least_seconds()
    assert bound <= analytic_step(costs, stages).pipeline_seconds


def test_the_slowest_stage_may_be_an_inner_one() -> None:
    """It has one block more than the ends of the model, which have other calls instead."""
    block = _plain_section(1.0, 1.0)
    layout = ParallelLayout(pipeline=3, micro_batches=5)
    parts = Sections(before=block, block=block, after=block, stream_bytes=0)
    costs = [LayoutCost(parts, _CLUSTER, layout, MIXED)] * 3
    step = analytic_step(costs, [StageBlocks(blocks=((block, n),)) for n in (1, 2, 1)])
    assert least_step_seconds(costs, 4) <= step.step_seconds


def _assignment(
    costs: Sequence[LayoutCost],
    stages: Sequence[StageBlocks],
    blocks: int,
    kinds_of: dict[LayoutCost, list[Kind]],
) -> StageAssignment:
    """Return the assignment within the memory that these stages need."""
    numbered = list(enumerate(zip(costs, stages, strict=True)))
    return StageAssignment(
        costs,
        [cost.memory(n, stage).nbytes for n, (cost, stage) in numbered],
        blocks,
        kinds_of.__getitem__,
        [cost.offloaded_bytes(n, stage) for n, (cost, stage) in numbered],
    )
