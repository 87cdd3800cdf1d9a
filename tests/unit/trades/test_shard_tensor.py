"""Tensor parallelism on a stored step: the offered regions, and one rank's program.

Not for how tensors are sharded, which needs torch: see tests/torch/trades/test_shard_tensor.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from steelyard.errors import BadInput
from steelyard.ir.graph import Role
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Program
from steelyard.predict import predict
from steelyard.trades.shard_tensor import ShardTensor
from tests.support.declared import costs
from tests.unit.graphs.stored import stored_step

SOURCE = stored_step("gpt-2-blocks")


@pytest.mark.parametrize("rank", [0, 1])
def test_all_offered_regions_together_halve_the_work_of_a_rank(rank: int) -> None:
    plain = Program.plain(SOURCE.graph(micro_batches=1), rank=rank)
    among = replace(plain, layout=ParallelLayout(tensor=2))
    offers, _ = ShardTensor().offers(among, SOURCE)
    assert len(offers) > 1
    rules = [rule for offer in offers for rule in offer.rules]
    program = ShardTensor().rewrite(among, rules, SOURCE)
    assert program.problems() == []
    parameters = [p.graph.resident_bytes(Role.PARAMETER) for p in (plain, program)]
    assert parameters[1] < 0.75 * parameters[0]
    alone, together = (predict(each, costs()).metrics for each in (plain, program))
    assert together.computation_seconds.value < 0.75 * alone.computation_seconds.value
    assert together.communication_bytes.value > 0 == alone.communication_bytes.value


def test_a_torch_without_the_rules_for_it_is_the_reason_of_the_rejection() -> None:
    happened = "tensor parallelism does not work under torch 2.11.0"

    def refuse(graph: Any, *, num_ranks: int) -> Any:
        raise BadInput(happened, expected="torch 2.12 or newer", remedy="install it")

    program: Any = SimpleNamespace(
        layout=SimpleNamespace(tensor=2), update=SimpleNamespace(unshardable=""), graph=None
    )
    source: Any = SimpleNamespace(regions=refuse)
    offers, (rejected,) = ShardTensor().offers(program, source)
    assert offers == ()
    assert (rejected.trade, rejected.reason) == (ShardTensor.name, happened)
