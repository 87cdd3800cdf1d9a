"""Each fast binding is bitwise equal to its operator, including the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steelyard.ir.graph import Node
from steelyard.operators import encode8, operator_named
from steelyard.run.fast_bindings import _BINDINGS, fastest_call

torch.manual_seed(0)
X, Y, M = torch.randn(4, 6), torch.randn(4, 6), torch.rand(4, 6) > 0.5
ONES, IDS = torch.ones(6), torch.tensor([[1, 3], [0, 2]])
CODED = encode8(X, [6, 1])

ARGUMENTS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "aten.add.Tensor": [((X, Y), {}), ((X, 2), {}), ((X, Y), {"alpha": 0.3}), ((IDS, 1.5), {})],
    "aten.sub.Tensor": [((X, Y), {}), ((X, 0.1), {"alpha": 2}), ((X, ONES), {})],
    "aten.addmm.default": [
        ((ONES[:4], X, Y.t()), {}), ((X[:, :4], X, Y.t()), {"beta": 2, "alpha": 3}),
    ],
    "aten.clone.default": [((X.t(),), {}), ((X.t(),), {"memory_format": torch.contiguous_format})],
    "aten.empty_like.default": [((X.t(),), {"dtype": torch.bool})],
    "aten.bernoulli.p": [((X, 0.4), {}), ((M, 0.9), {})],
    "aten.bmm.default": [((X[None], Y.t()[None]), {})],
    "aten.cat.default": [(([X, Y], 1), {}), (([X, Y],), {}), (([X, Y], -1), {})],
    "aten.div.Tensor": [((X, Y), {}), ((X, 3.0), {}), ((IDS, 2), {})],
    "aten.embedding.default": [((X, IDS), {}), ((X, IDS, 2, True, False), {})],
    "aten.exp.default": [((X,), {})],
    "aten.expand.default": [((X[None], [3, 4, 6]), {}), ((X[None], [3, -1, -1]), {})],
    "aten.gelu.default": [((X,), {})],
    "aten.masked_fill.Scalar": [((X, M, float("-inf")), {}), ((IDS, IDS > 1, 7), {})],
    "aten.mm.default": [((X, Y.t()), {}), ((X.t(), Y), {})],
    "aten.mul.Tensor": [((X, Y), {}), ((X, M), {}), ((X, 1.1111111111111112), {}), ((IDS, 2), {})],
    "aten.native_layer_norm.default": [
        ((X, [6], ONES, ONES, 1e-5), {}), ((X, [6], None, None, 0.1), {}),
    ],
    "aten.neg.default": [((X,), {})],
    "aten.permute.default": [((X, [1, 0]), {}), ((X[None], [-1, 0, 1]), {})],
    "aten.relu.default": [((X,), {})],
    "aten.rsqrt.default": [((X.abs(),), {})],
    "aten.select.int": [((X, 0, 2), {}), ((X, -1, -2), {})],
    "aten.sigmoid.default": [((X,), {})],
    "aten.sum.dim_IntList": [
        ((X, [0], True), {}), ((X, [0, 1]), {}), ((M, [1]), {}), ((X, []), {}), ((X, None), {}),
    ],
    "aten.t.default": [((X,), {})],
    "aten.tanh.default": [((X,), {})],
    "aten.transpose.int": [((X, 0, -1), {})],
    "aten.unsqueeze.default": [((X, 1), {}), ((X, -1), {})],
    "aten._unsafe_view.default": [((X, [6, 4]), {}), ((X, [-1, 2]), {})],
    "aten.view.default": [((X, [6, 4]), {}), ((X, [-1, 2]), {})],
    "aten.where.self": [((M, X, Y), {})],
    "steelyard.decode8.default": [((CODED, [4, 6], [1, 4], torch.float16), {})],
    "steelyard.encode8.default": [((X, [6, 1]), {}), ((X.t(), [1, 6]), {}), ((X, [1, 4]), {})],
    "steelyard.masked_scale.default": [((X, M, 1.1111111111111112), {}), ((X.t(), M.t(), 2), {})],
}  # fmt: skip


def results(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


def _shares(result: torch.Tensor, argument: Any) -> bool:
    if not isinstance(argument, torch.Tensor):
        return False
    return result.untyped_storage().data_ptr() == argument.untyped_storage().data_ptr()


@pytest.mark.parametrize("op", sorted(_BINDINGS))
def test_a_binding_computes_the_result_of_its_operator(op: str) -> None:
    assert ARGUMENTS[op]
    for args, kwargs in ARGUMENTS[op]:
        torch.manual_seed(1)
        expected = results(operator_named(op)(*args, **kwargs))
        torch.manual_seed(1)
        found = results(
            fastest_call(Node(name="n", op=op, kwargs=tuple(kwargs.items())))(*args, **kwargs)
        )
        assert len(expected) == len(found)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
            assert ours.shape == theirs.shape
            views = _shares(theirs, args[0])
            if views:
                assert ours.data_ptr() == theirs.data_ptr()
            elif op != "aten.empty_like.default":
                assert torch.equal(ours, theirs)


def test_a_keyword_that_no_binding_is_known_to_take_goes_to_the_operator() -> None:
    node = Node(name="n", op="aten.sum.dim_IntList", kwargs=(("dtype", None),))
    assert fastest_call(node) is not torch.sum
    assert torch.equal(
        fastest_call(node)(X, [0], dtype=torch.float64), X.sum(0, dtype=torch.float64)
    )
