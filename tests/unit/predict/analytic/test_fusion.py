"""Traffic and time of kernels under fusion: laws on blocks and on random graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published.equal_blocks import step_of_equal_blocks
from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.software_stack import SoftwareStack
from steelyard.ir.graph import Graph, Node, Output, OutputKind, Phase, Role, Storage, Tensor
from steelyard.ir.model_blocks import MIXED, ActivationPolicy
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.predict.analytic.fusion import FusedKernel, fused, unfused
from steelyard.predict.analytic.roofline import computed_flops, kernel_seconds
from steelyard.predict.analytic.sections import sections
from steelyard.predict.analytic.step import tensor_costs
from steelyard.predict.cost_table import CostTable
from tests.unit.graphs.stored import stored_graph

_BLOCKS = "blocks"
_MACHINE = Cluster.named("dgx-a100-80gb")
_NUMEL, _BYTES = 64, 256


def _node(
    name: str, *inputs: str, number: int, flops: int = 0, phase: Phase = Phase.FORWARD
) -> Node:
    tensor = Tensor(shape=(_NUMEL,), stride=(1,), dtype="float32", storage=number)
    return Node(
        name=name,
        op="input" if not inputs else "aten.mm.default" if flops else "aten.relu.default",
        inputs=inputs,
        outputs=(tensor,),
        flops=flops,
        moved_bytes=_BYTES * (1 + len(inputs)) if inputs else 0,
        phase=phase,
    )


def _graph(*nodes: Node) -> Graph:
    storages = tuple(
        Storage(nbytes=_BYTES, role=Role.BATCH if n.is_input else Role.ACTIVATION) for n in nodes
    )
    last = Output(kind=OutputKind.LOSS, node=nodes[-1].name)
    return Graph(nodes=nodes, storages=storages, outputs=(last,), decomposition="")


def _kernels(graph: Graph) -> dict[str, FusedKernel]:
    return {n.name: k for k in fused(graph, lambda n: n.phase) for n in k.nodes}


def test_a_chain_reads_what_comes_in_and_writes_what_goes_out() -> None:
    x, a = _node("x", number=0), _node("a", "x", number=1)
    b, c = _node("b", "a", number=2), _node("c", "b", "x", number=3)
    kernel = _kernels(_graph(x, a, b, c))["a"]
    assert [n.name for n in kernel.nodes] == ["a", "b", "c"]
    assert kernel.moved_bytes == 2 * _BYTES


def test_an_inner_value_that_is_read_elsewhere_is_written() -> None:
    x, a, b = _node("x", number=0), _node("a", "x", number=1), _node("b", "a", number=2)
    product = _node("p", "a", number=3, flops=1)
    kernels = _kernels(_graph(x, a, b, product))
    assert kernels["a"] is kernels["b"]
    # A value that nothing reads is not written, such as b.
    assert kernels["a"].moved_bytes == 2 * _BYTES


def test_saved_activations_of_a_fused_kernel_are_written() -> None:
    x, a, b = _node("x", number=0), _node("a", "x", number=1), _node("b", "a", number=2)
    loss = _node("loss", "b", number=3)
    back = _node("back", "a", "loss", number=4, phase=Phase.BACKWARD)
    kernels = _kernels(_graph(x, a, b, loss, back))
    assert kernels["a"] is kernels["loss"]
    assert kernels["a"] is not kernels["back"]
    assert kernels["a"].moved_bytes == 3 * _BYTES


def test_nothing_is_fused_around_a_product() -> None:
    x, a = _node("x", number=0), _node("a", "x", number=1)
    product = _node("p", "a", number=2, flops=1)
    both = _node("b", "a", "p", number=3)
    kernels = _kernels(_graph(x, a, product, both))
    # They are neighbours, but an input of the later one depends on the earlier one.
    assert kernels["a"] is not kernels["b"]


@st.composite
def _drawn(draw: st.DrawFn) -> Graph:
    nodes = [_node("n0", number=0)]
    for number in range(1, draw(st.integers(2, 12))):
        names = [n.name for n in nodes]
        inputs = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        flops = draw(st.sampled_from((0, 0, 0, 7)))
        nodes.append(_node(f"n{number}", *inputs, number=number, flops=flops))
    return _graph(*nodes)


@given(_drawn())
def test_fusing_never_adds_bytes_and_every_call_is_in_one_kernel(graph: Graph) -> None:
    kernels = fused(graph, lambda n: n.phase)
    names = [n.name for k in kernels for n in k.nodes]
    assert sorted(names) == sorted(n.name for n in graph.nodes if not n.is_free)
    for kernel in kernels:
        assert kernel.moved_bytes <= sum(k.moved_bytes for k in unfused(kernel.nodes))


@given(_drawn())
def test_kernels_can_be_run_one_after_another(graph: Graph) -> None:
    waits: dict[int, set[int]] = {}
    kernels = fused(graph, lambda n: n.phase)
    kernel_of = {n.name: id(k) for k in kernels for n in k.nodes}
    for kernel in kernels:
        before = {kernel_of[i] for n in kernel.nodes for i in n.inputs if i in kernel_of}
        waits[id(kernel)] = before - {id(kernel)}
    while waits:
        ready = [k for k, before in waits.items() if not before & waits.keys()]
        assert ready, "kernels wait for each other in a circle"
        for kernel in ready:
            del waits[kernel]


def _captured(tensor: int) -> Graph:
    return stored_graph("published-gpt" if tensor == 1 else f"published-gpt-on-{tensor}")


def _seconds(stack: SoftwareStack | None, tensor: int = 1, *again: str) -> float:
    layout = ParallelLayout(tensor=tensor, draws_parts=True)
    policy = ActivationPolicy(recomputed_modules=again)
    costs = tensor_costs(_MACHINE, layout)
    parts = sections(_captured(tensor), costs, layout, policy, blocks=_BLOCKS, stack=stack)
    step = step_of_equal_blocks(parts, _MACHINE, layout, MIXED, num_blocks=24, stack=stack)
    return step.step_seconds


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("again", [(), ("attention.core",), ("",)])
def test_fusing_never_takes_more_time(tensor: int, again: tuple[str, ...]) -> None:
    assert _seconds(SoftwareStack(), tensor, *again) < _seconds(
        SoftwareStack(fuses=False), tensor, *again
    )


@pytest.mark.parametrize("name", ["peak_share", "bandwidth_share"])
def test_a_software_stack_with_higher_shares_is_never_slower(name: str) -> None:
    took = [
        _seconds(SoftwareStack(call_seconds=0.0, **{name: share}))
        for share in (0.25, 0.5, 0.75, 1.0)
    ]
    assert took == sorted(took, reverse=True)
    assert took[0] > took[-1]


def test_summing_compute_and_traffic_takes_one_to_two_rooflines() -> None:
    # The roofline is the larger of compute and traffic; this model takes their sum.
    costs = CostTable(device=replace(_MACHINE.device, call_seconds=0.0))
    stack = SoftwareStack(fuses=False)
    for kernel in unfused(_captured(1).nodes):
        if kernel.nodes[0].collective is None:
            plain = kernel_seconds(kernel, costs, None)
            assert plain * (1 - 1e-9) <= kernel_seconds(kernel, costs, stack) <= 2 * plain


def test_call_overhead_is_hidden_by_running_kernels() -> None:
    """The call is made while the previous kernel runs."""
    kernels = [k for k in unfused(_captured(1).nodes) if k.nodes[0].collective is None]
    costs = tensor_costs(_MACHINE, ParallelLayout())
    for kernel in kernels:
        running, called = (
            kernel_seconds(kernel, costs, SoftwareStack(fuses=False, call_seconds=calling))
            for calling in (0.0, 1e-6)
        )
        assert called == max(running, 1e-6)
    assert _seconds(SoftwareStack(call_seconds=1e-3)) > 100 * _seconds(
        SoftwareStack(call_seconds=0.0)
    )


def test_attention_computes_whole_blocks_along_its_diagonal() -> None:
    long, short = (stored_graph(f"published-gpt-flash-{sequence}") for sequence in (1024, 64))
    # A causal kernel computes 36 of 8 by 8 blocks of 128 queries; fewer than 128 queries are one
    # block.
    for graph, share in ((long, 36 / 64), (short, 1.0)):
        kernels = [n for n in graph.nodes if n.op.startswith("aten._scaled_dot_product")]
        assert len(kernels) == 6
        for node in kernels:
            assert computed_flops(node) == pytest.approx(share * node.flops)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.35])
def test_shares_above_one_or_below_zero_are_refused(share: float) -> None:
    with pytest.raises(BadInput, match="shares"):
        SoftwareStack(bandwidth_share=share)


@pytest.mark.parametrize("along", [False, True])
def test_overlapping_tensor_parallel_exchanges_is_never_slower(along: bool) -> None:
    layout = ParallelLayout(tensor=4, draws_parts=True, regathers_activations=along)
    graph = stored_graph("published-gpt-on-4-along" if along else "published-gpt-on-4")
    costs = tensor_costs(_MACHINE, layout)
    plain, beside = (
        sections(
            graph, costs, layout, blocks=_BLOCKS, stack=SoftwareStack(overlaps_tensor=overlaps)
        ).block
        for overlaps in (False, True)
    )
    assert beside.backward_seconds < plain.backward_seconds
    assert beside.forward_seconds == plain.forward_seconds
    # At most the whole exchange time is hidden.
    hidden = plain.backward_seconds - beside.backward_seconds
    assert hidden <= plain.exchange_seconds
