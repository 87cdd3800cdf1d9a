"""Steps of deep models on declared clusters, from a capture of three blocks: laws, and published
figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published.equal_blocks import step_of_equal_blocks
from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.software_stack import SoftwareStack, StageSendMode
from steelyard.ir.graph import Graph
from steelyard.ir.model_blocks import MIXED, SAVE_ALL, ActivationPolicy, Formats
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Program
from steelyard.predict.analytic.sections import Sections, sections
from steelyard.predict.analytic.step import AnalyticStep, LayoutCost, tensor_costs
from steelyard.predict.collectives.algorithms import all_gather
from steelyard.predict.collectives.routes import route
from steelyard.predict.step import predict
from tests.unit.graphs.stored import stored_graph

_BLOCKS = "blocks"
_HIDDEN, _HEADS, _LENGTH, _VOCABULARY = 256, 8, 128, 512
_MICRO_BATCH = 2
_SBH = _LENGTH * _MICRO_BATCH * _HIDDEN
# Means and deviations of the norms, which the paper leaves out: 2 norms x 2 x 2 bytes a row.
_NORMS = 8 / _HIDDEN
_MACHINE = Cluster.named("dgx-a100-80gb")


def _graph(tensor: int = 1, *, along: bool = False) -> Graph:
    ranks = "" if tensor == 1 else f"-on-{tensor}"
    return stored_graph(f"published-gpt{ranks}{'-along' if along else ''}")


def _parts(
    layout: ParallelLayout, cluster: Cluster = _MACHINE, policy: ActivationPolicy = SAVE_ALL
) -> Sections:
    costs = tensor_costs(cluster, layout)
    return sections(_graph(layout.tensor), costs, layout, policy, blocks=_BLOCKS)


def _step(
    layout: ParallelLayout,
    cluster: Cluster = _MACHINE,
    *,
    num_blocks: int = 24,
    stage_blocks: tuple[int, ...] = (),
    policy: ActivationPolicy = SAVE_ALL,
) -> AnalyticStep:
    return step_of_equal_blocks(
        _parts(layout, cluster, policy), cluster, layout, MIXED, num_blocks=num_blocks,
        stage_blocks=stage_blocks,
    )  # fmt: skip


def _recomputing(*again: str, spared: tuple[str, ...] = ()) -> ActivationPolicy:
    return ActivationPolicy(recomputed_modules=again, spared=spared)


def _per_sbh(tensor: int, *again: str) -> float:
    layout = ParallelLayout(tensor=tensor, draws_parts=True)
    return _parts(layout, policy=_recomputing(*again)).block.saved_bytes / _SBH


@pytest.mark.parametrize("t", [1, 2, 4])
def test_a_block_keeps_what_korthikanti_counts(t: int) -> None:
    # Korthikanti et al., 2022 (arXiv 2205.05198), table 2.
    scores = 5 * _HEADS * _LENGTH / (_HIDDEN * t)
    assert _per_sbh(t) == pytest.approx(10 + 24 / t + scores + _NORMS, abs=1e-6)
    assert _per_sbh(t, "attention.core") == pytest.approx(10 + 24 / t + _NORMS, abs=1e-6)
    assert _per_sbh(t, "") == pytest.approx(2, abs=1e-6)


@pytest.mark.parametrize("t", [2, 4])
def test_a_block_along_the_sequence_keeps_what_korthikanti_counts(t: int) -> None:
    scores = 5 * _HEADS * _LENGTH / (_HIDDEN * t)
    for again, kept in (((), 34 / t + scores), (("attention.core",), 34 / t)):
        layout = ParallelLayout(tensor=t, draws_parts=True, regathers_activations=True)
        graph, policy = _graph(t, along=True), _recomputing(*again)
        costs = tensor_costs(_MACHINE, layout)
        block = sections(graph, costs, layout, policy, blocks=_BLOCKS).block
        # Equation 4 and the last row but one of table 2.
        assert block.saved_bytes / _SBH == pytest.approx(kept + _NORMS / t, abs=1e-6)
        kept_gathered = replace(layout, regathers_activations=False)
        whole = sections(graph, costs, kept_gathered, policy, blocks=_BLOCKS).block
        assert whole.saved_bytes > block.saved_bytes


def test_the_sections_of_three_blocks_are_the_whole_step() -> None:
    parts, costs = _parts(ParallelLayout()), tensor_costs(_MACHINE, ParallelLayout())
    whole = predict(Program.plain(_graph()), costs).metrics.computation_seconds
    total = parts.before.seconds + 3 * parts.block.seconds + parts.after.seconds
    # The first and the last block of a run have an operator more or less, because neighbours'
    # gradients are added there.
    assert total == pytest.approx(whole.value / costs.whole_step.value, rel=0.02)
    flops = parts.before.flops + 3 * parts.block.flops + parts.after.flops
    assert flops == sum(n.flops for n in _graph().nodes)


def test_exchanged_bytes_are_those_of_the_sharded_graph() -> None:
    parts = _parts(ParallelLayout(tensor=4))
    sent = sum(n.collective.sent_bytes for n in _graph(4).nodes if n.collective is not None)
    told = parts.before.exchanged_bytes + 3 * parts.block.exchanged_bytes
    assert told + parts.after.exchanged_bytes == sent
    # Four all-reduces of s b h values of two bytes (Shoeybi et al., 2019, figure 4), on a ring.
    assert parts.block.exchanged_bytes == 4 * 2 * 3 * (2 * _SBH // 4)


def test_recomputation_takes_time_and_saves_memory() -> None:
    policies = _recomputing(), _recomputing("attention.core"), _recomputing("")
    plain, core, whole = (_step(ParallelLayout(), policy=policy) for policy in policies)
    assert plain.step_seconds < core.step_seconds < whole.step_seconds
    kept = [step.stages[0].activation_bytes for step in (plain, core, whole)]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 3


def _with_links(factor: float) -> Cluster:
    tree = _MACHINE.tree
    members = tuple(
        replace(m, link=replace(m.link, bytes_per_second=factor * m.link.bytes_per_second))
        for m in tree.members
    )
    return Cluster(tree=replace(tree, members=members))


@pytest.mark.parametrize("axis", ["tensor", "data", "pipeline"])
def test_faster_links_never_make_a_step_slower(axis: str) -> None:
    layout = replace(ParallelLayout(micro_batches=4), **{axis: 2})
    took = [_step(layout, _with_links(f)).step_seconds for f in (0.01, 0.1, 1, 10)]
    assert took == sorted(took, reverse=True)
    assert took[0] > took[-1]


def test_each_state_stage_holds_less() -> None:
    held = [_step(ParallelLayout(data=4, state_stage=s)).stages[0] for s in range(4)]
    models = [h.weight_bytes + h.gradient_bytes + h.state_bytes for h in held]
    assert models == sorted(models, reverse=True)
    assert models[3] == pytest.approx(models[0] / 4, rel=1e-6)


def test_virtual_stages_wait_less_and_hold_more() -> None:
    layout = ParallelLayout(pipeline=4, micro_batches=8)
    plain, virtual = _step(layout), _step(replace(layout, virtual=3))
    # Korthikanti et al., section 4.2.3: activations grow by the factor 1 + (p - 1) / (p v).
    more = virtual.stages[0].activation_bytes / plain.stages[0].activation_bytes
    assert more == pytest.approx(1 + 3 / 12, rel=0.02)


def test_a_layout_that_does_not_multiply_is_refused() -> None:
    with pytest.raises(BadInput, match="devices"):
        _step(ParallelLayout(data=16))
    with pytest.raises(ValueError, match="on 5 stages"):
        _step(ParallelLayout(pipeline=5))
    with pytest.raises(BadInput, match="degrees"):
        ParallelLayout(tensor=0)


def test_spared_modules_are_kept_and_not_recomputed() -> None:
    whole = _parts(ParallelLayout(), policy=_recomputing("")).block
    spared = _parts(ParallelLayout(), policy=_recomputing("", spared=("up",))).block
    plain = _parts(ParallelLayout()).block
    assert whole.recompute_seconds > spared.recompute_seconds > plain.recompute_seconds
    # The result of the product, 4 s b h values of two bytes, is saved as well.
    assert spared.saved_bytes == whole.saved_bytes + 8 * _SBH < plain.saved_bytes


def test_stages_of_unequal_blocks_wait_for_the_longest() -> None:
    layout = ParallelLayout(pipeline=2, micro_batches=8)
    even, uneven = _step(layout), _step(layout, stage_blocks=(15, 9))
    assert uneven.pipeline_seconds > even.pipeline_seconds
    assert _step(layout, stage_blocks=(12, 12)) == even
    with pytest.raises(ValueError, match="on 2 stages"):
        _step(layout, stage_blocks=(12, 13))


def test_the_last_section_holds_workspace_beyond_its_activations() -> None:
    after = _parts(ParallelLayout()).after
    logits = 2 * _LENGTH * _MICRO_BATCH * _VOCABULARY
    assert after.peak_bytes >= after.saved_bytes + logits


def test_ring_algorithms_alone_are_never_faster() -> None:
    layout = ParallelLayout(data=8, state_stage=3)
    parts = _parts(layout)

    def took(stack: SoftwareStack) -> float:
        return step_of_equal_blocks(
            parts, _MACHINE, layout, MIXED, num_blocks=24, stack=stack
        ).step_seconds

    assert took(SoftwareStack(rings_only=True)) >= took(SoftwareStack())


def test_stage_messages_wait_according_to_the_send_mode() -> None:
    def took(handing: StageSendMode, stages: int) -> float:
        layout = ParallelLayout(pipeline=stages, micro_batches=8)
        stack = SoftwareStack(handing=handing)
        costs = tensor_costs(_MACHINE, layout)
        parts = sections(_graph(), costs, layout, blocks=_BLOCKS, stack=stack)
        step = step_of_equal_blocks(parts, _MACHINE, layout, MIXED, num_blocks=24, stack=stack)
        return step.pipeline_seconds

    def handed(stages: int) -> float:
        layout = ParallelLayout(pipeline=stages, micro_batches=8)
        once = LayoutCost(_parts(layout), _MACHINE, layout, MIXED).message_seconds
        # All stages for the first micro-batch, and the slowest stage for each further one.
        return (stages + 8 - 1) * once

    for stages, ways in ((2, 2), (4, 4)):
        beside = took(StageSendMode.BESIDE, stages)
        assert took(StageSendMode.AT_ONCE, stages) - beside == pytest.approx(2 * handed(stages))
        assert took(StageSendMode.IN_TURN, stages) - beside == pytest.approx(ways * handed(stages))


def test_scattered_stage_messages_are_gathered_by_the_receiver() -> None:
    def handed(layout: ParallelLayout) -> float:
        return LayoutCost(_parts(layout), _MACHINE, layout, MIXED).message_seconds

    split = ParallelLayout(tensor=4, pipeline=2)
    goes_on_split = replace(split, regathers_activations=True)
    gathered = all_gather(route(_MACHINE.tree, range(4)), 2 * _SBH)[0].seconds
    assert handed(split) - handed(goes_on_split) == pytest.approx(gathered)


def test_an_update_takes_the_time_of_its_known_traffic() -> None:
    layout = ParallelLayout()

    def took(formats: Formats) -> float:
        return step_of_equal_blocks(
            _parts(layout), _MACHINE, layout, formats, num_blocks=24
        ).update_seconds

    # Gradient and weight are moved once, the optimizer state is moved in both directions.
    assert took(replace(MIXED, update_bytes=2 + 2 + 2 * 12)) == took(MIXED)
    assert took(replace(MIXED, update_bytes=56)) == pytest.approx(2 * took(MIXED))
