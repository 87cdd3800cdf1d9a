from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from steelyard.errors import BadInput
from steelyard.trades.shard_tensor import ShardTensor


def test_a_torch_without_the_rules_for_it_is_the_reason_of_the_rejection() -> None:
    happened = "tensor parallelism does not work under torch 2.11.0"

    def refuse(graph: Any, *, num_ranks: int) -> Any:
        raise BadInput(happened, expected="torch 2.12 or newer", remedy="install it")

    program: Any = SimpleNamespace(layout=SimpleNamespace(tensor=2), update=None, graph=None)
    source: Any = SimpleNamespace(regions=refuse)
    offers, (rejected,) = ShardTensor().offers(program, source)
    assert offers == ()
    assert (rejected.trade, rejected.reason) == ("shard_tensor", happened)
