"""The tables of the Python runner give the same bits; the newer one takes less memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steelyard.capture.tracing import decompositions
from tests import zoo
from tests.harness import Trial, costs_of, predicted_above
from tests.zoo.case import square_loss

MASKED = "steelyard.masked_scale.default"


def trial(name: str, table: str) -> Trial:
    return Trial(*zoo.case(name).make(), decomposition=table)


@pytest.mark.parametrize("name", ["mlp", "gpt", "edge_dropout_transposed", "edge_turned_gradients"])
def test_dropout_in_one_call_has_the_bits_of_two_products_and_of_eager(name: str) -> None:
    older, newer = trial(name, "python-1"), trial(name, "python-2")
    one_call = newer.run(newer.plain)
    assert one_call.difference(older.run(older.plain)) is None
    assert one_call.difference(newer.eager()) is None
    graph = newer.source.graph(micro_batches=1)
    assert predicted_above(newer.plain, costs_of(graph)) == one_call.peak_bytes


def test_a_fused_dropout_holds_no_intermediate() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 8))
    step = model, square_loss, {"x": torch.randn(512, 8)}
    older, newer = (Trial(*step, decomposition=table) for table in ("python-1", "python-2"))
    assert MASKED in {n.op for n in newer.source.graph(micro_batches=1).nodes}
    assert newer.run(newer.plain).peak_bytes < older.run(older.plain).peak_bytes


def test_a_gradient_with_other_strides_than_its_mask_keeps_them() -> None:
    x = torch.randn(3, 4)
    mask = torch.rand(4, 3).t() > 0.5
    product = decompositions.masked_scale_in_one_op(x, mask, 1.25)
    assert product.stride() == x.stride()
    assert torch.equal(product, decompositions.masked_scale_in_two_ops(x, mask, 1.25))
    for dtype in (torch.bfloat16, torch.float64):
        given = torch.randn(3, 4, dtype=dtype)
        mine = decompositions.masked_scale_in_one_op(given, mask.contiguous(), 1.25)
        assert mine.dtype is dtype
        assert torch.equal(mine, decompositions.masked_scale_in_two_ops(given, mask, 1.25))
