"""The predicted time of a pipelined step: compared with one rank, over slower links, by schedule.

Not for offers and refusals: see tests/unit/trades/test_shard_pipeline.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.ir.collective import GLOO, Exchange
from steelyard.ir.parallel_layout import DATA, PIPELINE
from steelyard.predict import peak_bytes, predict, step_seconds
from steelyard.trades.shard_pipeline import SCHEDULES
from tests.support.declared import costs
from tests.unit.trades.test_shard_pipeline import SOURCE, applied, offered, stages


def test_all_reduces_and_messages_among_stages_have_their_own_link_rates() -> None:
    known = costs()
    slow, fast = (replace(known.links[PIPELINE], bytes_per_second=rate) for rate in (1e6, 1e9))
    priced = replace(known, links={**known.links, DATA: slow, PIPELINE: fast})
    for kind, link in ((Exchange.ALL_REDUCE, slow), (Exchange.ALL_GATHER, fast)):
        among = GLOO.collective(kind, axis=PIPELINE, num_ranks=2, nbytes=1 << 20)
        seconds = link.seconds(among.sent_bytes, messages=among.hops)
        assert priced.exchange_seconds(among).value == pytest.approx(seconds)


def test_layers_in_two_halves_take_about_half_each() -> None:
    whole, halves = predict(SOURCE.plain, costs()), predict(stages("blocks.1"), costs())
    assert halves.metrics.step_seconds.value < 0.75 * whole.metrics.step_seconds.value
    assert halves.peak.resident_bytes < 0.62 * whole.peak.resident_bytes
    assert halves.metrics.step_seconds.low <= halves.metrics.step_seconds.value
    assert sum(h.nbytes for h in halves.peak.alive) + halves.peak.workspace_bytes == pytest.approx(
        halves.peak.nbytes, rel=0.02
    )
    assert halves.timeline is not None
    assert max(halves.timeline.nbytes) == halves.peak.nbytes


def test_a_slower_link_never_makes_the_step_faster() -> None:
    seconds = [step_seconds(stages("blocks.1"), costs(r)).value for r in (1e12, 1e8, 1e6, 1e4)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 2 * seconds[0]


def test_each_schedule_has_its_advantage_in_time_or_memory() -> None:
    """Zero-bubble schedules wait less than 1F1B, and 1F1B holds less than GPipe."""
    rules = offered(2)
    programs = {s: applied(*own, micro_batches=8) for s, own in rules.items()}
    takes = {s: step_seconds(p, costs()).value for s, p in programs.items()}
    holds = {s: peak_bytes(p, costs()) for s, p in programs.items()}
    assert takes["ZBVZeroBubble"] < takes["Interleaved1F1B"] < takes["1F1B"]
    assert takes["1F1B"] == pytest.approx(takes["GPipe"], rel=0.02)
    assert holds["1F1B"] < 0.8 * holds["GPipe"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_call_overhead_of_pipeline_actions_is_priced(schedule: str) -> None:
    """Twice as many micro-batches are twice as many actions, each of which takes some calls."""
    known, call = costs(), 1e-3
    links = {axis: replace(link, call_seconds=call) for axis, link in known.links.items()}
    for parts in (4, 8):
        program = applied(*offered(2)[schedule], micro_batches=parts)
        assert program.pipeline is not None
        most = max(map(len, program.pipeline.order.ranks))
        without, within = (
            step_seconds(program, each).value for each in (known, replace(known, links=links))
        )
        # Some of the calls may be in the idle time of a rank.
        assert within - without > 4 * call * most
