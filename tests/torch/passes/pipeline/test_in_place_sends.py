"""Operators of torch write their result into a given buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from steelyard.operators import operator_named
from steelyard.passes.pipeline.in_place_sends import WRITING

X = torch.randn(6, 6)


@pytest.mark.parametrize(
    ("op", "given"),
    [
        ("aten.mm.default", [X, X]),
        ("aten.addmm.default", [X[0], X, X]),
        ("aten.add.Tensor", [X, X]),
        ("aten.gelu.default", [X]),
        ("aten.threshold_backward.default", [X, X, 0]),
        ("aten._softmax_backward_data.default", [X, X.softmax(1), 1, torch.float32]),
        ("aten.sum.dim_IntList", [X, [1]]),
        ("aten.where.self", [X > 0, X, -X]),
        ("aten.cat.default", [[X, X], 1]),
    ],
)
def test_out_variants_write_the_result(op: str, given: Sequence[Any]) -> None:
    expected = operator_named(op)(*given)
    writing, keyword = WRITING[op]
    place = torch.full_like(expected, float("nan"))
    made = operator_named(writing)(*given, **{keyword: place})
    assert made.data_ptr() == place.data_ptr()
    assert torch.equal(place, expected)
