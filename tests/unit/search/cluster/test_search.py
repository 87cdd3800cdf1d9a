"""Layouts of deep models on declared clusters, compared with every layout and every mix of
blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, pairwise, product

import pytest

from steelyard.errors import Mismatch
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.cluster_file import decode_tree
from steelyard.hardware.topology import TopologyLevel
from steelyard.ir.batch_template import BatchTemplate
from steelyard.ir.model_blocks import ActivationPolicy
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.plans.trade import apply_rules
from steelyard.predict import peak_bytes
from steelyard.predict.analytic.step import StageBlocks, analytic_step
from steelyard.predict.analytic.trace import analytic_spans
from steelyard.predict.cost_table import CostTable
from steelyard.search.cluster.from_rules import RuleContext, from_rules
from steelyard.search.cluster.policy_mixture import ALIKE
from steelyard.search.cluster.recompute_sets import recompute_sets
from steelyard.search.cluster.search import ClusterPlan, ClusterSearch
from steelyard.search.cluster.stage_assignment import RecomputeSet
from steelyard.search.cluster.to_rules import to_rules
from steelyard.trades import TRADES
from steelyard.trades.chunk import ChunkRule
from steelyard.trades.offload_state import OffloadStateRule
from steelyard.trades.recompute import recomputable
from steelyard.trades.shard_tensor import ShardTensorRule
from tests.unit.graphs.stored import StoredTemplates, stored_step, stored_templates
from tests.unit.search.cluster.test_policy_mixture import _divisions as divisions

_BLOCKS, _MOST_KINDS = 6, 3
# Width, heads, length and samples are 32, 2, 16 and 8; 64, 4, 8 and 4; 32, 4, 64 and 4.
_SHAPES = ("deep-gpt", "deep-gpt-wide", "deep-gpt-long")
_RANKS = (1, 2, 3, 4)
_LITTLE = "400 KiB"
# Shares of the range from the least memory of any layout to that with everything saved.
_ROOM = (0.02, 0.1, 0.25, 0.5, 1.5)


def _cluster(
    count: int,
    rate: str = "25 GB/s",
    share: str = "100 %",
    slow: str = "",
    host: str = "",
    call: str = "5 us",
) -> Cluster:
    """Return a cluster.

    ``slow`` is the memory of every second rank, which has half the speed. ``host`` is the rate of a
    device's host link and its host memory, as they are written in a cluster file.
    """
    way, room = host.split(" and ") if host else ("", "")
    behind = f'host_memory = "{room}"\nhost_link = "h"' if host else ""
    link = f'[link.h]\nrate = "{way}"\nlatency = "10 us"' if host else ""
    return (
        Cluster(tree=_mixed(slow, rate))
        if slow
        else Cluster(
            tree=decode_tree(f"""
[device.d]
memory = "16 GiB"
memory_bandwidth = "900 GB/s"
peak = {{ float32 = "15 TFLOP/s" }}
reached = {{ share = "{share}", call = "{call}" }}
{behind}
{link}
[link.l]
rate = "{rate}"
latency = "5 us"
[scope.cluster]
members = {{ d = {count} }}
link = "l"
""")
        )
    )


def _mixed(slow: str, rate: str) -> TopologyLevel:
    return decode_tree(f"""
[device.d]
memory = "16 GiB"
memory_bandwidth = "900 GB/s"
peak = {{ float32 = "15 TFLOP/s" }}
[device.e]
memory = "{slow}"
memory_bandwidth = "450 GB/s"
peak = {{ float32 = "7 TFLOP/s" }}
[link.l]
rate = "{rate}"
latency = "5 us"
[scope.two]
members = {{ d = 1, e = 1 }}
link = "l"
[scope.cluster]
members = {{ two = 2 }}
link = "l"
""")


@cache
def _search(
    shape: str,
    rate: str = "25 GB/s",
    share: str = "100 %",
    slow: str = "",
    host: str = "",
    call: str = "5 us",
) -> ClusterSearch:
    step = stored_templates(shape)

    def find_recompute_sets(sampled: BatchTemplate, costs: CostTable) -> tuple[RecomputeSet, ...]:
        graph = sampled.graph
        found = recompute_sets(graph, costs, step.blocks, values=recomputable(graph))
        # Few sets, so that every mixture can be enumerated.
        return (found[0], *found[1:][:: max(1, len(found) // (_MOST_KINDS - 1))])[:_MOST_KINDS]

    return ClusterSearch(
        step, _cluster(8, rate, share, slow, host, call), find_recompute_sets=find_recompute_sets
    )


def _every_layout(search: ClusterSearch, ranks: int) -> Iterator[tuple[ParallelLayout, int]]:
    for way in search.candidates(ranks):
        yield way.layout, way.micro_batch
        if search.pricing.has_host_memory(way.layout):
            yield replace(way.layout, offloads_state=True), way.micro_batch


def _every_step(search: ClusterSearch, ranks: int) -> Iterator[tuple[float, int]]:
    """Yield seconds and bytes of every layout, division of blocks and mix of kinds that fits the
    memory of all devices and hosts."""
    for layout, micro_batch in _every_layout(search, ranks):
        stages = layout.pipeline
        laid, places = (
            search.pricing.stage_costs(layout, micro_batch),
            search.pricing.stage_devices.of(layout),
        )
        fates = [
            ActivationPolicy(recomputed=again, is_offloaded=moved)
            for again in search.pricing.recompute_sets_of(layout.tensor)
            for moved in ((False, True) if search.pricing.has_host_memory(layout) else (False,))
        ]
        kinds = [
            [search.pricing.block(layout.tensor, micro_batch, fate, place.device) for fate in fates]
            for place in places
        ]
        for counts in divisions(_BLOCKS, stages):
            if layout.virtual > 1 and len(set(counts)) > 1:
                continue
            mixes = (
                [_stage(chosen) for chosen in combinations_with_replacement(own, count)]
                for own, count in zip(kinds, counts, strict=True)
            )
            for held in product(*mixes):
                step = analytic_step(laid, held)
                fits = zip(step.stages, places, strict=True)
                far = (
                    on.offloaded_bytes(n, s)
                    for n, (on, s) in enumerate(zip(laid, held, strict=True))
                )
                rooms = (place.device.host_memory_bytes or 0 for place in places)
                if all(stage.nbytes <= place.memory_bytes for stage, place in fits) and all(
                    nbytes <= room for nbytes, room in zip(far, rooms, strict=True)
                ):
                    yield step.step_seconds, step.peak_bytes


def _stage(chosen: tuple[object, ...]) -> StageBlocks:
    return StageBlocks(blocks=tuple((block, 1) for block in chosen))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("shape", "ranks", "share", "slow", "host"),
    [
        *(
            (s, r, "100 %", "", "")
            for s in _SHAPES
            for r in _RANKS
            if s == _SHAPES[0] or r in (2, 3)
        ),
        (_SHAPES[0], 2, "40 %", "", ""),
        # Ranks of two classes, also if the slower class has little memory.
        *((_SHAPES[0], r, "100 %", "16 GiB", "") for r in (2, 3, 4)),
        *((_SHAPES[0], r, "100 %", _LITTLE, "") for r in (2, 3)),
        # Host memory with fast and slow links, and one case with little of it.
        (_SHAPES[0], 1, "100 %", "", "12 GB/s and 1 GiB"),
        (_SHAPES[0], 2, "100 %", "", "12 GB/s and 1 GiB"),
        (_SHAPES[0], 2, "100 %", "", "1 GB/s and 1 GiB"),
        (_SHAPES[1], 1, "100 %", "", "12 GB/s and 400 KiB"),
    ],
)
def test_the_plan_is_within_its_gap_of_the_best_there_is(
    shape: str, ranks: int, share: str, slow: str, host: str
) -> None:
    search = _search(shape, share=share, slow=slow, host=host)
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


def _without_one(laid: ClusterPlan, samples: int) -> Iterator[tuple[str, ClusterPlan]]:
    """Return the same plan without one of its trades."""
    layout = laid.layout
    data = layout.data * layout.tensor
    others = {
        "shard_states": replace(
            layout, state_stage=0, overlaps=layout.state_stage > 0 or layout.overlaps
        ),
        "offload_state": replace(layout, offloads_state=False),
        "overlap": replace(layout, overlaps=False),
        "shard_tensor": replace(layout, tensor=1, data=data),
        "accumulate": replace(layout, micro_batches=1, virtual=1),
    }
    for trade, other in others.items():
        if other != layout and samples % (other.data * other.micro_batches) == 0:
            yield trade, replace(laid, layout=other)
    for trade, without in (("offload", {"is_offloaded": False}), ("recompute", {"recomputed": ()})):
        stages = tuple(tuple((replace(f, **without), n) for f, n in s) for s in laid.stages)  # type: ignore[arg-type]
        if stages != laid.stages:
            yield trade, replace(laid, stages=stages)


@pytest.mark.parametrize(
    ("shape", "ranks", "host", "rate", "call"),
    [
        (_SHAPES[0], 2, "12 GB/s and 1 GiB", "25 GB/s", "5 us"),
        # Links so fast or so slow that many choices make no difference, and calls so long that no
        # exchange does.
        (_SHAPES[2], 4, "12 GB/s and 1 GiB", "10 MB/s", "5 us"),
        (_SHAPES[1], 2, "1 GB/s and 100 KiB", "1 GB/s", "5 us"),
        (_SHAPES[0], 2, "12 GB/s and 1 GiB", "1000 GB/s", "10 ms"),
        (_SHAPES[0], 4, "", "25 GB/s", "10 ms"),
    ],
)
def test_without_any_of_its_trades_a_plan_does_not_fit_or_is_slower(
    shape: str, ranks: int, host: str, rate: str, call: str
) -> None:
    search = _search(shape, rate, host=host, call=call)
    roomy = search.fastest(ranks, 1 << 40)
    assert roomy is not None
    for share in (1.5, 1.0, 0.8, 0.6, 0.4, 0.3):
        limit = int(roomy.step.peak_bytes * share)
        found = search.fastest(ranks, limit)
        if found is None:
            continue
        every = [search.plan_layout(way, limit) for way in search.candidates(ranks)]
        least = min(laid.step.step_seconds for laid in every if laid is not None)
        assert found.step.step_seconds <= least * (1 + ALIKE)
        assert search.fits_memory(found, limit)
        for trade, other in _without_one(found, search.num_samples):
            without = search.price_layout(other.layout, other.stages)
            # Overlap costs nothing, so it is kept if it saves anything.
            alike = found.step.step_seconds if trade == "overlap" else least * (1 + ALIKE)
            is_slower = without.step.step_seconds > alike
            assert is_slower or not search.fits_memory(without, limit), (trade, found)


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


def test_a_search_with_more_samples_is_independent() -> None:
    # Calls are short, because otherwise they would outweigh the time of these few bytes.
    search = _search(_SHAPES[0], call="50 ns")
    more = search.with_samples(16)
    one, other = search.fastest(2, 1 << 40), more.fastest(2, 1 << 40)
    assert one is not None
    assert other is not None
    assert other.step.step_seconds > one.step.step_seconds
    kept = [found.step.stages[0].activation_bytes for found in (one, other)]
    assert 1.9 < kept[1] / kept[0] <= 2
    assert more.num_samples == 2 * search.num_samples == 16


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rules_describe_a_layout_completely(ranks: int) -> None:
    search, step = _search(_SHAPES[0]), stored_templates(_SHAPES[0])
    whole = stored_step("gpt-6-blocks").plain
    for way in search.candidates(ranks)[:40]:
        laid = search.plan_layout(way, 1 << 40)
        assert laid is not None
        layout = laid.layout
        regions = step.regions(layout.tensor) if layout.tensor > 1 else ()
        rules = to_rules(laid, step.whole.graph, regions, step.blocks, TRADES)

        def of(trade: str, rules: object = rules) -> list[object]:
            return [r for r in rules if r.trade == trade]  # type: ignore[attr-defined]

        assert [r.ranks for r in of("shard_batch")] == [layout.data] * (layout.data > 1)  # type: ignore[attr-defined]
        assert len(of("shard_pipeline")) == (layout.pipeline * layout.virtual - 1) * (
            layout.pipeline > 1
        )
        assert [r.micro_batches for r in of("accumulate")] == [layout.micro_batches] * (  # type: ignore[attr-defined]
            layout.micro_batches > 1
        )
        trained = sum(n.name.startswith("parameter:") for n in whole.graph.inputs())
        shared = sum(r.count for r in of("shard_states"))  # type: ignore[attr-defined]
        assert shared == (trained if layout.state_stage else 0)
        cut = sum(r.count for r in of("shard_tensor"))  # type: ignore[attr-defined]
        # Each of three blocks has as many rules as the middle one, which has six.
        assert (cut > 6) == (layout.tensor > 1)


def test_recomputed_blocks_hold_the_memory_of_the_full_program() -> None:
    """The program of all blocks, with the same rules applied, is predicted call by call.

    It recomputes each value when it is needed, while a deep model's block is recomputed at once.
    """
    step, whole = stored_templates(_SHAPES[2]), stored_step("gpt-6-blocks")

    def find_recompute_sets(sampled: BatchTemplate, costs: CostTable) -> tuple[RecomputeSet, ...]:
        graph = sampled.graph
        return recompute_sets(graph, costs, step.blocks, values=recomputable(graph))

    search = ClusterSearch(step, _cluster(1), find_recompute_sets=find_recompute_sets)
    plain = Program.plain(whole.graph(micro_batches=1))
    costs = search.pricing.costs_of(1, search.pricing.stage_devices.classes[0])
    sets, held = search.pricing.recompute_sets_of(1), []
    for again in sets:
        laid = search.price_layout(
            ParallelLayout(), (((ActivationPolicy(recomputed=again), _BLOCKS),),)
        )
        applied = apply_rules(plain, _rules(step, laid), trades=TRADES, source=whole)
        kept = laid.step.stages[0].activation_bytes + laid.step.stages[0].workspace_bytes
        exact = peak_bytes(applied, costs)
        # The applied program has no update.
        assert (
            0.99 * exact <= laid.step.peak_bytes - laid.step.stages[0].state_bytes <= 1.25 * exact
        )
        held.append((kept, exact))
    assert len(sets) > 3
    # The set that recomputes the most saves more than half of the memory, in both.
    (most, most_exact), (least, least_exact) = held[0], held[-1]
    assert least < most / 2
    assert least_exact < most_exact / 2


def _told(step: StoredTemplates) -> RuleContext:
    return RuleContext(
        trades=TRADES,
        graph=step.whole.graph,
        blocks=step.blocks,
        num_samples=step.num_samples,
        regions=step.regions,
    )


def _rules(step: StoredTemplates, laid: ClusterPlan) -> tuple[Rule, ...]:
    tensor = laid.layout.tensor
    regions = step.regions(tensor) if tensor > 1 else ()
    return to_rules(laid, step.whole.graph, regions, step.blocks, TRADES)


@pytest.mark.parametrize("host", ["", "12 GB/s and 1 GiB"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rules_read_back_are_the_layout(ranks: int, host: str) -> None:
    """Memory is ample, and then short: then blocks have different policies."""
    search, step = _search(_SHAPES[0], host=host), stored_templates(_SHAPES[0])
    kinds = set()
    for way in search.candidates(ranks):
        roomy = search.plan_layout(way, 1 << 40)
        assert roomy is not None
        least, most = search.least_bytes(way), roomy.step.peak_bytes
        for room in (1.0, 0.5, 0.3, 0.2):
            laid = search.plan_layout(way, int(least + room * (most - least)))
            if laid is None:
                continue
            found = from_rules(_rules(step, laid), search, _told(step))
            assert found.layout == laid.layout
            assert [dict(stage) for stage in found.stages] == [dict(s) for s in laid.stages]
            assert found.step.step_seconds == pytest.approx(laid.step.step_seconds, rel=1e-12)
            assert found.step.peak_bytes == laid.step.peak_bytes
            kinds |= {
                (bool(f.recomputed), f.is_offloaded) for stage in laid.stages for f, _ in stage
            }
    assert {(False, False), (True, False)} <= kinds
    assert bool(host) == any(moved for _, moved in kinds)


def _one_more(rules: tuple[Rule, ...], trade: str) -> tuple[Rule, ...]:
    return (*rules, replace(next(r for r in rules if r.trade == trade), module="head.nowhere"))


def _other(rules: tuple[Rule, ...], trade: str, **changed: object) -> tuple[Rule, ...]:
    first = next(r for r in rules if r.trade == trade)
    return tuple(replace(r, **changed) if r is first else r for r in rules)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda r: _one_more(r, "recompute"), "outside of the blocks of blocks"),
        (lambda r: _other(r, "recompute", module="blocks.9.up"), "none of the 6 blocks"),
        (lambda r: _other(r, "shard_pipeline", behind="blocks.5"), "that has a successor"),
        (lambda r: _other(r, "shard_pipeline", schedule="GPipe"), "does not write such a rule"),
        (lambda r: _other(r, "accumulate", micro_batches=3), "do not divide into"),
        (
            lambda r: (*r, ChunkRule(module="a", op="aten.mm", slices=4)),
            "does not write such a rule",
        ),
        (
            lambda r: (*r, OffloadStateRule(parameter="head.weight", what="optimizer")),
            "declares no host memory",
        ),
        (lambda r: (*r, ShardTensorRule(parameter="a", ranks=16, dim=0)), "needs 32 ranks"),
    ],
)
def test_inapplicable_rules_are_refused(
    edit: Callable[[tuple[Rule, ...]], tuple[Rule, ...]], said: str
) -> None:
    search, step = _search(_SHAPES[0]), stored_templates(_SHAPES[0])
    ways = search.candidates(2)
    way = next(w for w in ways if w.layout.pipeline == 2 and w.layout.micro_batches == 4)
    roomy = search.plan_layout(way, 1 << 40)
    assert roomy is not None
    laid = search.plan_layout(way, (search.least_bytes(way) + roomy.step.peak_bytes) // 2)
    assert laid is not None
    with pytest.raises(Mismatch, match=said):
        from_rules(edit(_rules(step, laid)), search, _told(step))


def test_partially_offloaded_blocks_are_refused() -> None:
    search, step = _search(_SHAPES[0], host="12 GB/s and 1 GiB"), stored_templates(_SHAPES[0])
    (way,) = (w for w in search.candidates(1) if w.layout.micro_batches == 1)
    roomy = search.plan_layout(way, 1 << 40)
    assert roomy is not None
    stages = ((*((ActivationPolicy(is_offloaded=True), 6),),),)
    rules = _rules(step, search.price_layout(ParallelLayout(), stages))
    assert from_rules(rules, search, _told(step)).stages == stages
    first = next(r for r in rules if r.trade == "offload")
    with pytest.raises(Mismatch, match="but the block saves"):
        from_rules([r for r in rules if r != first], search, _told(step))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_trace_of_a_layout_ends_at_its_prediction(ranks: int) -> None:
    search = _search(_SHAPES[0])
    for way in search.candidates(ranks):
        laid = search.plan_layout(way, 1 << 40)
        assert laid is not None
        layout = laid.layout
        drawn = analytic_spans(search.stage_costs(laid), search.stage_blocks(laid))
        assert len({span.rank for span in drawn}) == layout.pipeline
        for rank in {span.rank for span in drawn}:
            own = [span for span in drawn if span.rank == rank]
            assert own[0].begin_seconds >= 0
            for one, other in pairwise(own):
                assert one.end_seconds == pytest.approx(other.begin_seconds, abs=1e-12)
        ends = max(span.end_seconds for span in drawn)
        assert ends == pytest.approx(laid.step.step_seconds)


def test_stage_ends_are_the_last_blocks_of_the_stages() -> None:
    search, step = _search(_SHAPES[1]), stored_templates(_SHAPES[1])
    for way in search.candidates(3):
        if way.layout.pipeline == 3:
            laid = search.plan_layout(way, 1 << 40)
            assert laid is not None
            rules = to_rules(laid, step.whole.graph, (), step.blocks, TRADES)
            ends = [r.behind for r in rules if r.trade == "shard_pipeline"]
            counts = [sum(n for _, n in stage) for stage in laid.stages]
            assert sum(counts) == _BLOCKS
            runs = way.layout.virtual
            so_far = [sum((counts * runs)[: i + 1]) // runs for i in range(3 * runs - 1)]
            assert sorted(ends) == sorted(f"blocks.{n - 1}" for n in so_far)
