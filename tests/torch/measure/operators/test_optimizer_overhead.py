"""The Python time of the optimizer is never negative, and larger if there is more of it."""

from functools import partial

import torch

from steelyard.hardware.cluster import Device
from steelyard.ir.graph import Node, Phase
from steelyard.ir.metrics import Estimate
from steelyard.measure.operators.optimizer_overhead import update_call_seconds
from steelyard.predict.cost_table import CostTable


def test_python_between_the_calls_is_found_and_bounded() -> None:
    adamw = partial(torch.optim.AdamW, lr=0.1)
    found = update_call_seconds(adamw, dims=[1, 2] * 10, calls=200, device=torch.device("cpu"))
    assert 0 <= found.low <= found.value <= found.high < 0.1


def test_only_operators_of_the_update_pay_for_it() -> None:
    device = Device(kind="t", flops_per_second=1e9, bytes_per_second=1e9, memory_bytes=1)
    plain = CostTable(device=device)
    costs = CostTable(device=device, update_call_seconds=Estimate.exactly(1.0))
    step = Node(name="a", op="aten.add_.Tensor", phase=Phase.UPDATE)
    other = Node(name="b", op="aten.add.Tensor", phase=Phase.BACKWARD)
    assert costs.seconds(step).value == plain.seconds(step).value + 1.0
    assert costs.seconds(other) == plain.seconds(other)
