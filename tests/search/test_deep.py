"""Layouts of deep models on declared clusters: held to every layout and every mix of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import combinations_with_replacement, product

import pytest
import torch

from steelyard.capture.sampled import SampledStep
from steelyard.core.cluster import Cluster
from steelyard.core.cluster_file import decode_tree
from steelyard.core.costs import Costs
from steelyard.core.sampled import Sampled
from steelyard.predict.deep import Stage
from steelyard.search.deep import DeepSearch
from steelyard.search.deep_rules import rules_of
from steelyard.search.deep_stages import Again
from steelyard.search.kinds import sets_again
from steelyard.trades.recompute import recomputable
from tests.search.test_mixing import _divisions as divisions
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

_BLOCKS, _MOST_KINDS = 6, 3
_SHAPES = ((32, 2, 16, 8), (64, 4, 8, 4), (32, 4, 64, 4))  # width, heads, length, samples
_RANKS = (1, 2, 3, 4)
# Of what lies between the least that any layout holds and what all kept would.
_ROOM = (0.02, 0.1, 0.25, 0.5, 1.5)


def _cluster(count: int, rate: str = "25 GB/s", share: str = "100 %") -> Cluster:
    return Cluster(
        tree=decode_tree(f"""
[device.d]
memory = "16 GiB"
memory_bandwidth = "900 GB/s"
peak = {{ float32 = "15 TFLOP/s" }}
reached = {{ share = "{share}" }}
[link.l]
rate = "{rate}"
latency = "5 us"
[scope.cluster]
members = {{ d = {count} }}
link = "l"
""")
    )


@cache
def _step(shape: tuple[int, int, int, int]) -> SampledStep:
    width, heads, length, samples = shape
    model = GPT(layers=_BLOCKS, width=width, heads=heads, vocabulary=64, length=length)
    return SampledStep(
        model=model, loss=next_token_loss, batch=tokens(samples, length, 64),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
    )  # fmt: skip


@cache
def _search(
    shape: tuple[int, int, int, int], rate: str = "25 GB/s", share: str = "100 %"
) -> DeepSearch:
    step = _step(shape)

    def again_of(sampled: Sampled, costs: Costs) -> tuple[Again, ...]:
        graph = sampled.graph
        found = sets_again(graph, costs, step.blocks, values=recomputable(graph))
        # Few, so that every mix can be looked at.
        return (found[0], *found[1:][:: max(1, len(found) // (_MOST_KINDS - 1))])[:_MOST_KINDS]

    return DeepSearch(step, _cluster(8, rate, share), again_of=again_of)


def _every_step(search: DeepSearch, ranks: int) -> Iterator[tuple[float, int]]:
    """Seconds and bytes of every layout, division of blocks and mix of kinds."""
    for way in search.ways(ranks):
        layout, stages = way.layout, way.layout.pipeline
        laid = search._laid_out(way)
        sets = search._sets_of(layout.tensor)
        kinds = [search._parts(layout, way.micro_batch, again).block for again in sets]
        for counts in divisions(_BLOCKS, stages):
            if layout.virtual > 1 and len(set(counts)) > 1:
                continue
            mixes = (
                [_stage(chosen) for chosen in combinations_with_replacement(kinds, count)]
                for count in counts
            )
            for held in product(*mixes):
                step = laid.step(held)
                yield step.step_seconds, step.peak_bytes


def _stage(chosen: tuple[object, ...]) -> Stage:
    return Stage(blocks=tuple((block, 1) for block in chosen))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("shape", "ranks", "share"),
    [
        *((s, r, "100 %") for s in _SHAPES for r in _RANKS if s == _SHAPES[0] or r in (2, 3)),
        (_SHAPES[0], 2, "40 %"),
    ],
)
def test_the_plan_is_within_its_gap_of_the_best_there_is(
    shape: tuple[int, int, int, int], ranks: int, share: str
) -> None:
    search = _search(shape, share=share)
    every = list(_every_step(search, ranks))
    least_bytes = min(nbytes for _, nbytes in every)
    most_bytes = max(nbytes for _, nbytes in every)
    for room in _ROOM:
        limit = int(least_bytes + room * (most_bytes - least_bytes))
        best = min(seconds for seconds, nbytes in every if nbytes <= limit)
        found = search.fastest(ranks, limit)
        assert found is not None
        bound = search.least_seconds(ranks, limit, found)
        assert found.step.peak_bytes <= limit
        assert bound <= best * (1 + 1e-9), "the bound is none"
        assert best * (1 - 1e-9) <= found.step.step_seconds, "a step that brute force cannot find"
        assert found.step.step_seconds <= 1.02 * best
    assert search.fastest(ranks, least_bytes - 1) is None


def test_a_slower_link_or_less_of_a_device_or_of_memory_is_never_faster() -> None:
    quick, roomy = _search(_SHAPES[0]), 1 << 40
    slower = _search(_SHAPES[0], "1 GB/s"), _search(_SHAPES[0], share="40 %")
    for ranks in _RANKS[1:]:
        a = quick.fastest(ranks, roomy)
        assert a is not None
        for slow in slower:
            b = slow.fastest(ranks, roomy)
            assert b is not None
            assert a.step.step_seconds <= b.step.step_seconds
        assert a.step.step_seconds < b.step.step_seconds, "less of the device costs nothing"
        limits = [a.step.peak_bytes * share // 10 for share in (10, 8, 6)]
        found = [quick.fastest(ranks, limit) for limit in limits]
        seconds = [f.step.step_seconds for f in found if f is not None]
        assert seconds == sorted(seconds)


def test_the_same_step_on_more_samples_is_looked_into_anew() -> None:
    search = _search(_SHAPES[0])
    more = search.with_samples(16)
    one, other = search.fastest(2, 1 << 40), more.fastest(2, 1 << 40)
    assert one is not None
    assert other is not None
    assert other.step.step_seconds > one.step.step_seconds
    kept = [found.step.stages[0].activation_bytes for found in (one, other)]
    assert 1.9 < kept[1] / kept[0] <= 2
    assert more.num_samples == 2 * search.num_samples == 16


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rules_say_all_of_a_layout(ranks: int) -> None:
    search, step = _search(_SHAPES[0]), _step(_SHAPES[0])
    for way in search.ways(ranks)[:40]:
        laid = search.laid(way, 1 << 40)
        assert laid is not None
        layout = laid.layout
        regions = step.regions(layout.tensor) if layout.tensor > 1 else ()
        rules = rules_of(laid, step.whole.graph, regions, step.blocks)

        def of(trade: str, rules: object = rules) -> list[object]:
            return [r for r in rules if r.trade == trade]  # type: ignore[attr-defined]

        assert [r.degree for r in of("shard_batch")] == [layout.data] * (layout.data > 1)  # type: ignore[attr-defined]
        assert len(of("shard_pipeline")) == (layout.pipeline * layout.virtual - 1) * (
            layout.pipeline > 1
        )
        assert [r.degree for r in of("accumulate")] == [layout.micro_batches] * (  # type: ignore[attr-defined]
            layout.micro_batches > 1
        )
        trained = sum(
            1 for _ in GPT(layers=6, width=32, heads=2, vocabulary=64, length=16).parameters()
        )
        shared = sum(r.count for r in of("shard_states"))  # type: ignore[attr-defined]
        assert shared == (trained if layout.state_stage else 0)
        cut = sum(r.count for r in of("shard_tensor"))  # type: ignore[attr-defined]
        # Of three blocks as many as of the middle one, six times.
        assert (cut > 6) == (layout.tensor > 1)


def test_the_ends_of_stages_are_where_their_blocks_end() -> None:
    search, step = _search(_SHAPES[1]), _step(_SHAPES[1])
    for way in search.ways(3):
        if way.layout.pipeline == 3:
            laid = search.laid(way, 1 << 40)
            assert laid is not None
            rules = rules_of(laid, step.whole.graph, (), step.blocks)
            ends = [r.module for r in rules if r.trade == "shard_pipeline"]
            counts = [sum(n for _, n in stage) for stage in laid.stages]
            assert sum(counts) == _BLOCKS
            runs = way.layout.virtual
            so_far = [sum((counts * runs)[: i + 1]) // runs for i in range(3 * runs - 1)]
            assert sorted(ends) == sorted(f"blocks.{n - 1}" for n in so_far)
