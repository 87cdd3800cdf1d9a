"""The trace of a step ends at its predicted end, and nothing does two things at the same time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from steelyard.ir.program import Program
from steelyard.plans.trace_span import DEVICE, Span
from steelyard.predict import predict, spans
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.trades.shard_pipeline import SCHEDULES
from tests.support.declared import costs
from tests.unit.trades.test_shard_pipeline import SOURCE, applied, offered

_BATCH = (
    ShardBatchRule(ranks=2, bucket=16 << 10), OverlapRule(window=2),
)  # fmt: skip
RULES = {
    "alone": ((), 1),
    "micro-batches": ((), 4),
    "shared": (_BATCH, 1),
    "shared, in micro-batches": (_BATCH, 2),
}


def streams(found: tuple[Span, ...]) -> dict[tuple[int, str], list[Span]]:
    each: dict[tuple[int, str], list[Span]] = {}
    for span in found:
        each.setdefault((span.rank, span.stream), []).append(span)
    return each


@pytest.mark.parametrize("name", RULES)
def test_trace_of_a_step_ends_at_its_prediction(name: str) -> None:
    rules, parts = RULES[name]
    program = applied(*rules, micro_batches=parts)
    _check(program)
    found, metrics = spans(program, costs(1e7)), predict(program, costs(1e7)).metrics
    assert {span.rank for span in found} == set(range(program.layout.num_ranks))
    computing = sum(s.seconds for s in found if s.rank == 0 and s.stream == DEVICE)
    assert computing == pytest.approx(metrics.computation_seconds.value, rel=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_trace_of_a_pipeline_ends_at_its_prediction(schedule: str) -> None:
    program = applied(*offered(2)[schedule], micro_batches=4)
    _check(program)
    works = [s.name for s in spans(program, costs(1e7)) if s.rank == 0 and s.stream == DEVICE]
    assert sum(name.startswith("forward") for name in works) == 4 * SCHEDULES[schedule]
    assert works[-1] == "update"


def _check(program: Program) -> None:
    found = spans(program, costs(1e7))
    expected = predict(program, costs(1e7)).metrics.step_seconds.value
    assert max(span.end_seconds for span in found) == pytest.approx(expected, rel=1e-9)
    for own in streams(found).values():
        for before, after in pairwise(sorted(own, key=lambda s: s.begin_seconds)):
            assert after.begin_seconds >= before.end_seconds - 1e-12
    assert SOURCE.plain.update is not None
