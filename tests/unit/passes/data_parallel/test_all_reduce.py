"""Buckets of all-reduces in a graph: each gradient once, in order, and nothing else changed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import BadInput
from steelyard.ir.collective import GLOO, Exchange
from steelyard.ir.graph import Axis, Graph, OutputKind, Ref
from steelyard.ir.program import Program
from steelyard.passes.data_parallel.all_reduce import SHARE, bucketed_all_reduce, with_whole_loss
from tests.support.graphs import random_step
from tests.support.made_up import chain

_GRADIENTS = (OutputKind.GRADIENT, OutputKind.SUMMED)


def reduced(graph: Graph, *, bucket_bytes: int, num_ranks: int = 2) -> Graph:
    return bucketed_all_reduce(
        graph, bucket_bytes=bucket_bytes, num_ranks=num_ranks, transport=GLOO
    )


@pytest.mark.parametrize(
    ("bucket_bytes", "buckets"),
    [
        (1, [["work0"], ["work1"], ["work2"], ["work3"], ["work4"]]),
        (2048, [["work0", "work1"], ["work2", "work3"], ["work4"]]),
        (4000, [["work0", "work1", "work2"], ["work3", "work4"]]),
        (1 << 20, [["work0", "work1", "work2", "work3", "work4"]]),
    ],
)
def test_buckets_are_filled_in_the_order_of_the_backward_pass(
    bucket_bytes: int, buckets: list[list[str]]
) -> None:
    graph = reduced(chain(gradients=5), bucket_bytes=bucket_bytes)
    names = [node.name for node in graph.nodes]
    assert len(graph.collectives) == len(buckets)
    for issued, bucket in zip(graph.collectives, buckets, strict=True):
        collective = graph.by_name[issued].collective
        assert collective is not None
        assert collective.kind is Exchange.ALL_REDUCE
        assert collective.sent_bytes == 1024 * len(bucket)
        assert Axis("data") in graph.by_name[issued].args
        # The exchange is issued after the bucket's last gradient, before anything else is computed.
        last = names.index(bucket[-1])
        between = graph.nodes[last + 1 : names.index(issued)]
        assert all(n.is_free or n.op == "aten.cat.default" for n in between)


def test_each_gradient_keeps_its_strides() -> None:
    before = chain(gradients=3)
    after = reduced(before, bucket_bytes=1 << 20)
    for old, new in zip(before.outputs, after.outputs, strict=True):
        assert (old.kind, old.target) == (new.kind, new.target)
        laid_out, now = (g.by_name[o.node].outputs[0] for g, o in ((before, old), (after, new)))
        assert (laid_out.shape, laid_out.stride, laid_out.dtype) == (
            now.shape,
            now.stride,
            now.dtype,
        )
    offsets = [after.by_name[o.node].outputs[0].offset for o in after.outputs[1:]]
    assert offsets == [0, 256, 512]


def test_a_gradient_of_another_dtype_has_its_own_bucket() -> None:
    graph = chain(gradients=3)
    changed = graph.by_name["work1"]
    half = replace(changed, outputs=(replace(changed.outputs[0], dtype="bfloat16"),))
    graph = replace(graph, nodes=tuple(half if n is changed else n for n in graph.nodes))
    after = reduced(graph, bucket_bytes=1 << 20)
    sent = [after.by_name[name].collective for name in after.collectives]
    assert [c.sent_bytes for c in sent if c is not None] == [1024, 512, 1024]


def test_a_bucket_is_reduced_in_place() -> None:
    graph = reduced(chain(gradients=4), bucket_bytes=2048)
    for issued in map(graph.by_name.__getitem__, graph.collectives):
        assert issued.mutates == issued.inputs
        assert [graph.storages_of(name) for name in issued.inputs] == [
            graph.storages_of(issued.name)
        ]


def test_a_gradient_with_other_readers_is_not_overwritten() -> None:
    after = reduced(chain(gradients=2), bucket_bytes=1)
    assert after.users["work0"][-1] == "work1"
    assert [after.by_name[name].mutates for name in after.collectives] == [(), ("work1",)]


def test_a_gradient_shared_by_two_parameters_is_reduced_for_each() -> None:
    graph = chain(gradients=2)
    outputs = tuple(replace(o, node="work1") if o.node == "work0" else o for o in graph.outputs)
    after = reduced(replace(graph, outputs=outputs), bucket_bytes=1)
    assert [after.by_name[name].mutates for name in after.collectives] == [(), ()]


def test_a_gradient_with_gaps_is_refused() -> None:
    graph = chain(gradients=1)
    changed = graph.by_name["work0"]
    gaps = replace(changed, outputs=(replace(changed.outputs[0], stride=(2,)),))
    graph = replace(graph, nodes=tuple(gaps if n is changed else n for n in graph.nodes))
    with pytest.raises(BadInput, match="parameter p0 has gaps"):
        reduced(graph, bucket_bytes=1)


def test_the_global_loss_is_the_weighted_sum_of_the_losses() -> None:
    before = random_step(3)
    graph = with_whole_loss(before, num_ranks=4, transport=GLOO)
    (old,), (new,) = (
        [o.node for o in g.outputs if o.kind is OutputKind.LOSS] for g in (before, graph)
    )
    (issued,) = graph.collectives
    assert graph.by_name[new].waits_for == issued
    (weighed,) = graph.by_name[issued].inputs
    assert graph.by_name[weighed].args == (Ref(old), Ref(SHARE))
    assert [n.name for n in graph.inputs() if n.name == SHARE] == [SHARE]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), bucket_bytes=st.integers(1, 16_384), ranks=st.integers(2, 9))
def test_every_gradient_is_sent_once(seed: int, bucket_bytes: int, ranks: int) -> None:
    before = random_step(seed)
    after = reduced(before, bucket_bytes=bucket_bytes, num_ranks=ranks)
    program = Program.plain(after)
    assert after.problems() == program.problems() == []
    gradients = [o for o in before.outputs if o.kind is OutputKind.GRADIENT]
    nbytes = sum(before.by_name[o.node].outputs[0].nbytes for o in gradients)
    reduced_bytes = sum(
        after.by_name[i].outputs[0].nbytes
        for name in after.collectives
        for i in after.by_name[name].inputs
    )
    assert reduced_bytes == nbytes
    # A ring of n sends 2 (n - 1) / n of the bytes, in equal shares that may have to be padded.
    hops = 2 * (ranks - 1)
    assert hops * nbytes / ranks <= program.sent_bytes <= hops * (nbytes / ranks + len(gradients))
    for exchange in program.exchanges:
        assert exchange.wait is not None
    _assert_nothing_reads_what_is_overwritten(after)
    # All values are still computed, from the same values except for the tangent.
    for node in before.nodes:
        assert after.by_name[node.name].op == node.op


def _assert_nothing_reads_what_is_overwritten(graph: Graph) -> None:
    """Check all readers except the exchange, its wait, and views of the result."""
    for name in graph.collectives:
        issued = graph.by_name[name]
        lying = {s for written in issued.mutates for s in graph.storages_of(written)}
        behind = graph.nodes[graph.position[name] + 1 :]
        for node in behind:
            read = {s for i in node.inputs for s in graph.storages_of(i)}
            assert node.waits_for == name or node.is_free or not read & lying


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), bucket_bytes=st.integers(1, 16_384), parts=st.integers(2, 5))
def test_accumulated_gradients_are_sent_with_the_last_micro_batch(
    seed: int, bucket_bytes: int, parts: int
) -> None:
    before = random_step(seed)
    graph = with_whole_loss(before, num_ranks=2, transport=GLOO, repeats=parts)
    graph = bucketed_all_reduce(
        graph, bucket_bytes=bucket_bytes, num_ranks=2, transport=GLOO, repeats=parts
    )
    program = Program.plain(graph).repeated(parts)
    once = Program.plain(
        reduced(with_whole_loss(before, num_ranks=2, transport=GLOO), bucket_bytes=bucket_bytes)
    )
    assert program.problems() == program.earlier.problems() == []
    assert program.sent_bytes == once.sent_bytes
    assert program.earlier.exchanges == ()
    assert program.passes == (program.earlier,) * (parts - 1) + (program,)
    # The earlier micro-batches compute what one device computes, and the weight of their loss.
    computed = {i.node for i in program.earlier.instructions if i.sink is None}
    assert computed - {i.node for i in Program.plain(before).instructions} == {program.earlier.loss}
    given = [o.target for o in before.outputs if o.kind is OutputKind.GRADIENT]
    for one, kinds in ((program.earlier, 1), (program, 2)):
        targets = [o.target for o in one.graph.outputs if o.kind in _GRADIENTS]
        assert sorted(targets) == sorted(given * kinds)


def test_a_single_accumulated_gradient_is_sent_as_a_view() -> None:
    """The wait can see that nothing else holds the tensor."""
    graph = bucketed_all_reduce(
        chain(gradients=1), bucket_bytes=1, num_ranks=2, transport=GLOO, repeats=2
    )
    (issued,) = graph.collectives
    (sent,) = graph.by_name[issued].inputs
    assert not graph.by_name[sent].is_input
    assert graph.by_name[sent].is_view


def test_sending_a_sum_before_its_last_term_is_a_problem() -> None:
    graph = bucketed_all_reduce(
        chain(gradients=3), bucket_bytes=1 << 20, num_ranks=2, transport=GLOO, repeats=2
    )
    program = Program.plain(graph).repeated(2)
    lines = program.instructions
    late = [i for i in lines if i.sink is not None and i.sink.kind is OutputKind.GRADIENT]
    assert program.problems() == []
    behind = replace(program, instructions=(*(i for i in lines if i not in late), *late))
    assert any("before all parts are added" in problem for problem in behind.problems())


def test_planning_exchanges_needs_no_torch() -> None:
    probe = (
        "import sys, steelyard.passes.data_parallel.all_reduce\n"
        "import steelyard.passes.data_parallel.shard_parameters\n"
        "import steelyard.passes.data_parallel.overlap, steelyard.comm.backend_bugs\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
