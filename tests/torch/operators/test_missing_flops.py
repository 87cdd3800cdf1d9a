"""Operators that may multiply and have no FLOP formula are named here, and refused on a declared
cluster."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

import steelyard as sy
from steelyard.capture.step import CapturedStep
from steelyard.errors import CaptureRefused
from steelyard.hardware.cluster_file import decode_tree
from steelyard.hardware.host_os import this_device
from steelyard.operators.flops import formula_of
from steelyard.predict.cost_table import CostTable
from steelyard.predict.missing_flops import notes_on_uncounted


@pytest.mark.parametrize(
    "name",
    [
        "mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "linear",
        "linear_backward", "convolution", "convolution_backward", "_grouped_mm",
        "_scaled_grouped_mm", "_scaled_mm", "_int_mm", "_weight_int4pack_mm", "_weight_int8pack_mm",
        "_cudnn_rnn", "_scaled_dot_product_cudnn_attention", "_flash_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu", "_trilinear", "_cdist_forward",
    ],
)  # fmt: skip
def test_products_have_a_formula(name: str) -> None:
    packet = getattr(torch.ops.aten, name)
    assert formula_of(getattr(packet, packet.overloads()[0])) is not None


# --- an unknown operator

_LIBRARY = torch.library.Library("steelyard_tests", "FRAGMENT")
_LIBRARY.define("mixed(Tensor x, Tensor w) -> Tensor")
_LIBRARY.define("mixed_backward(Tensor gradient, Tensor x, Tensor w) -> (Tensor, Tensor)")


def _mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def _mixed_backward(
    gradient: torch.Tensor, x: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return gradient @ w.t(), x.t() @ gradient


for _name, _function in (("mixed", _mixed), ("mixed_backward", _mixed_backward)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "steelyard_tests::mixed",
    lambda ctx, gradient: torch.ops.steelyard_tests.mixed_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=_LIBRARY,
)


class Mixed(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.steelyard_tests.mixed(x, self.weight)


def mixed(blocks: int) -> nn.Module:
    many = (nn.Sequential(Mixed(), nn.GELU()) for _ in range(blocks))
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(*many)))


def loss(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x).square().mean()


BATCH = torch.randn(32, 64)


def declared(count: int) -> sy.Cluster:
    tree = decode_tree(f"""
[device.d]
memory = "1 GiB"
memory_bandwidth = "900 GB/s"
peak = {{ float32 = "15 TFLOP/s" }}
[link.l]
rate = "25 GB/s"
latency = "5 us"
[scope.cluster]
members = {{ d = {count} }}
link = "l"
""")
    return sy.Cluster(tree=tree)


def test_the_share_of_operators_without_a_flop_formula_is_reported() -> None:
    found = [n for n in sy.plan(mixed(2), loss, BATCH).plan.notes if "FLOPs" in n]
    assert len(found) == 2
    first, second = found
    assert first.startswith("steelyard_tests.mixed in blocks.*.* has no FLOP formula")
    assert first.endswith("of the computation time, as measured")
    assert "its 2 calls take " in first
    assert second.startswith("steelyard_tests.mixed_backward in blocks.*.* ")


def test_an_unmeasured_operator_without_a_formula_is_reported() -> None:
    graph = CapturedStep(model=mixed(1), loss=loss, batch=BATCH).captured().graph
    said = list(notes_on_uncounted([graph], CostTable(device=this_device())))
    assert said
    assert said[0].endswith(
        "estimated from the bytes that it moves, because it could not be measured"
    )


@pytest.mark.parametrize(("blocks", "devices"), [(8, 4), (2, 4), (2, 1)])
def test_a_declared_cluster_refuses_operators_without_a_formula(blocks: int, devices: int) -> None:
    with pytest.raises(CaptureRefused) as caught:
        sy.plan(mixed(blocks), loss, BATCH, cluster=declared(devices))
    happened, expected, remedy = str(caught.value).splitlines()
    assert "steelyard_tests.mixed in blocks.*.*" in happened
    assert "declared cluster" in expected
    assert "register_flop_formula(torch.ops.steelyard_tests.mixed)" in remedy


def test_an_operator_with_a_formula_is_priced_by_its_flops() -> None:
    packets = torch.ops.steelyard_tests.mixed, torch.ops.steelyard_tests.mixed_backward
    register_flop_formula(packets[0])(lambda x, w, *_, **__: 2 * x[0] * x[1] * w[1])
    register_flop_formula(packets[1])(lambda _, x, w, *__, **___: 4 * x[0] * x[1] * w[1])
    try:
        planned = sy.plan(mixed(8), loss, BATCH, cluster=declared(1))
        assert planned.plan.before.flops == 8 * 6 * 32 * 64 * 64
    finally:
        for packet in packets:
            del flop_registry[packet]
