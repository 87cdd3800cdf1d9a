import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.hardware.cluster import Device
from steelyard.ir.graph import Node
from steelyard.ir.metrics import Estimate
from steelyard.measure.operators.interpolate import declared_from
from steelyard.predict.cost_table import CostTable, OperatorCost

DEVICE = Device(kind="d", flops_per_second=1e9, bytes_per_second=1e9, memory_bytes=1 << 30)
PLAIN = CostTable(device=DEVICE)


def node(op: str, *, nbytes: int, flops: int = 0) -> Node:
    return Node(
        name=f"{op}{nbytes}", op=op, signature=f"{op}{nbytes}", moved_bytes=nbytes, flops=flops
    )


def measured(node: Node, times: float, workspace: int = 0) -> OperatorCost:
    seconds = Estimate.exactly(times * PLAIN.declared_seconds(node).value)
    return OperatorCost(seconds=seconds, workspace_bytes=workspace)


@settings(deadline=None)
@given(st.floats(0.01, 100), st.integers(1, 1 << 40))
def test_the_same_operator_is_off_by_the_same_factor(times: float, nbytes: int) -> None:
    known, other = node("mul", nbytes=1000), node("mul", nbytes=nbytes + 1000)
    misleading = node("mm", nbytes=1000, flops=10)
    costs = CostTable(
        device=DEVICE,
        operators={
            known.signature: measured(known, times, workspace=500),
            misleading.signature: measured(misleading, 7 * times),
        },
    )
    (found,) = declared_from(costs, [known, other, misleading]).values()
    declared = PLAIN.declared_seconds(other).value
    assert found.seconds.value == pytest.approx(times * declared)
    assert found.seconds.low < found.seconds.value < found.seconds.high
    assert not found.is_measured
    assert found.workspace_bytes == round((nbytes + 1000) / 2)


def test_without_the_operator_one_of_the_same_kind_is_used() -> None:
    mover, product = node("mul", nbytes=1000), node("mm", nbytes=1000, flops=10)
    wanted = node("add", nbytes=4000)
    costs = CostTable(
        device=DEVICE,
        operators={
            mover.signature: measured(mover, 2.0),
            product.signature: measured(product, 9.0),
        },
    )
    found = declared_from(costs, [mover, product, wanted])[wanted.signature]
    assert found.seconds.value == pytest.approx(2.0 * PLAIN.declared_seconds(wanted).value)


def test_without_a_similar_operator_the_roofline_is_used() -> None:
    product, wanted = node("mm", nbytes=1000, flops=10), node("add", nbytes=4000)
    costs = CostTable(device=DEVICE, operators={product.signature: measured(product, 9.0)})
    found = declared_from(costs, [product, wanted])[wanted.signature]
    assert found.seconds == PLAIN.declared_seconds(wanted)
    assert found.workspace_bytes == 0
