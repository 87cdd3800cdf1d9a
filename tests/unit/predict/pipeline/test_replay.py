"""Torch's real schedule tables, replayed with artificial durations: laws, and the textbook."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import PlanFileError
from steelyard.ir.pipeline_schedule import (
    ActionKind,
    Order,
    actions_of,
    source_of,
)
from steelyard.predict.pipeline.replay import GIVE_GRADIENTS, Replay, Replayed, StageCost, replay
from tests.unit.graphs.stored import stored_order

SCHEDULES = (
    "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble",
    "DualPipeV",
)  # fmt: skip
_SIZES = [(2, 4), (2, 8), (4, 8), (4, 16)]
_PER_RANK = {"GPipe": 1, "1F1B": 1}


def _order(schedule: str, num_ranks: int, micro_batches: int) -> Order:
    num_stages = num_ranks * _PER_RANK.get(schedule, 2)
    return stored_order(
        schedule, num_ranks=num_ranks, num_stages=num_stages, micro_batches=micro_batches
    )


def _cost(forward: float, to_inputs: float, to_weights: float, *, sent: float = 0.0) -> StageCost:
    return StageCost(
        seconds={
            ActionKind.FORWARD: forward,
            ActionKind.BACK_TO_INPUTS: to_inputs,
            ActionKind.BACK_TO_WEIGHTS: to_weights,
            ActionKind.BACKWARD: to_inputs + to_weights,
        },
        send_seconds=sent,
        send_back_seconds=sent,
        sends={"on": 3},
        sends_back={"back": 3},
        kept={"kept": 100},
        kept_between={"between": 60},
        working_bytes=dict.fromkeys(ActionKind, 10),
        first_bytes=dict.fromkeys(GIVE_GRADIENTS, 10 + 7),
        gradient_bytes=7,
    )


def _equal(order: Order, *, share: float = 1.0) -> Replay:
    """Return equal stages: forward 1, backward 2, for a rank's whole share."""
    return replay(order, [_cost(share, share, share)] * order.num_stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "micro_batches"), _SIZES)
@settings(max_examples=10, deadline=None)
@given(seconds=st.data())
def test_no_action_starts_before_its_inputs_have_arrived(
    schedule: str, num_ranks: int, micro_batches: int, seconds: st.DataObject
) -> None:
    order = _order(schedule, num_ranks, micro_batches)
    some = st.floats(0.01, 10)
    stages = [
        _cost(*seconds.draw(st.tuples(some, some, some)), sent=seconds.draw(some))
        for _ in range(order.num_stages)
    ]
    replayed = replay(order, stages)
    at = {str(r.action): r for ranked in replayed.ranks for r in ranked}
    assert len(at) == sum(map(len, order.ranks))
    for ranked in replayed.ranks:
        for one, other in itertools.pairwise(ranked):
            assert one.end_seconds <= other.begin_seconds
    for r in at.values():
        stage, mb = r.action.stage, r.action.micro_batch
        reads = {
            ActionKind.FORWARD: [f"{stage - 1}F{mb}"],
            ActionKind.BACK_TO_WEIGHTS: [f"{stage}I{mb}"],
        }
        back = [f"{stage}F{mb}", f"{stage + 1}B{mb}", f"{stage + 1}I{mb}"]
        for name in reads.get(r.action.work, back):
            if name not in at:
                continue
            source = at[name]
            sent = stages[source.action.stage].send_seconds if source.rank != r.rank else 0.0
            assert r.begin_seconds >= source.end_seconds + sent - 1e-9, (name, str(r.action))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("num_ranks", "micro_batches"), _SIZES)
def test_equal_stages_leave_the_textbook_bubble(
    schedule: str, num_ranks: int, micro_batches: int
) -> None:
    """The bubble is (p-1)/(m+p-1): Huang et al., GPipe, 2019, section 2.3; that of 1F1B is the
    same."""
    replayed = _equal(_order(schedule, num_ranks, micro_batches))
    expected = (num_ranks - 1) / (micro_batches + num_ranks - 1)
    assert replayed.bubble == pytest.approx(expected)


@pytest.mark.parametrize(("num_ranks", "micro_batches"), _SIZES)
def test_interleaving_and_splitting_backward_shrink_the_bubble(
    num_ranks: int, micro_batches: int
) -> None:
    plain = _equal(_order("1F1B", num_ranks, micro_batches))
    halves = {
        name: _equal(_order(name, num_ranks, micro_batches), share=0.5)
        for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    }
    assert halves["Interleaved1F1B"].seconds < plain.seconds
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        assert halves[name].seconds <= halves["Interleaved1F1B"].seconds + 1e-9, name
        assert halves[name].bubble < plain.bubble


def test_messages_slow_down_only_concurrent_work() -> None:
    """GPipe's first rank works for 1 and sends for 1; the second one works for 1 when the first
    message has come. A message takes half of the time of a working rank."""
    order = _order("GPipe", 2, 2)
    once = _cost(1.0, 1.0, 1.0, sent=1.0)
    disturbed = replay(order, [once, replace(once, send_back_seconds=0.0)], disturbs=0.5)
    ends = {str(r.action): r.end_seconds for ranked in disturbed.ranks for r in ranked}
    # The first message takes from 1 to 2, while the first rank computes and the second waits. The
    # first rank's next operator is half done at 2 and ends at 2.5; then the second message takes
    # until 3.5.
    assert ends["0F0"] == 1.0
    assert ends["0F1"] == 2.5
    # It begins at 2, and from 2.5 on runs at half speed.
    assert ends["1F0"] == 3.5
    # No message is in transit any more.
    assert ends["1F1"] == 4.5


@pytest.mark.parametrize(
    ("schedule", "first", "second", "seconds"),
    [("GPipe", 1, 3, 133.1), ("1F1B", 1, 1, 55.8), ("1F1B", 3, 1, 130.1)],
)
def test_disturbed_pipelines_agree_with_an_exact_simulation(
    schedule: str, first: int, second: int, seconds: float
) -> None:
    """The figures come from an independent event simulation; the mirror image of a GPipe
    pipeline takes as long."""
    order = _order(schedule, 2, 8)

    def taken(*widths: int) -> float:
        costs = [_cost(w, 2 * w, 2 * w, sent=0.9) for w in widths]
        return replay(order, costs, disturbs=0.5).seconds

    assert taken(first, second) == pytest.approx(seconds)
    if schedule == "GPipe":
        assert taken(second, first) == pytest.approx(seconds)


def _busy_seconds(ranked: tuple[Replayed, ...]) -> float:
    return sum(r.end_seconds - r.begin_seconds for r in ranked)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=20, deadline=None)
@given(seconds=st.data(), disturbs=st.floats(0.01, 1.0))
def test_messages_slow_down_each_end_by_at_most_their_duration(
    schedule: str, seconds: st.DataObject, disturbs: float
) -> None:
    order = _order(schedule, 2, 8)
    some = st.floats(0.01, 10)
    stages = [
        _cost(*seconds.draw(st.tuples(some, some, some)), sent=seconds.draw(some))
        for _ in range(order.num_stages)
    ]
    free, disturbed = replay(order, stages), replay(order, stages, disturbs=disturbs)
    under_way = sum(
        stages[r.action.stage].send_seconds
        for ranked in free.ranks
        for r in ranked
        if r.action.work is not ActionKind.BACK_TO_WEIGHTS
    )
    for before, after in zip(free.ranks, disturbed.ranks, strict=True):
        own, taken = (
            sum(r.end_seconds - r.begin_seconds for r in each) for each in (before, after)
        )
        assert own - 1e-6 <= taken <= own + disturbs * under_way + 1e-6
        for one, other in itertools.pairwise(after):
            assert one.end_seconds <= other.begin_seconds
    bound = free.seconds + disturbs * under_way
    assert disturbed.seconds <= bound + 1e-6


@pytest.mark.parametrize(("num_ranks", "micro_batches"), _SIZES)
def test_1f1b_holds_no_more_than_gpipe(num_ranks: int, micro_batches: int) -> None:
    """GPipe's ranks keep every micro-batch, and all that they sent. 1F1B's ranks keep the
    micro-batches in flight from them on, one that was sent early, and the last one sent in each
    direction."""
    gpipe = _equal(_order("GPipe", num_ranks, micro_batches)).peak_bytes
    other = _equal(_order("1F1B", num_ranks, micro_batches)).peak_bytes
    sends_on = [rank < num_ranks - 1 for rank in range(num_ranks)]
    assert gpipe == tuple((100 + 3 * sends) * micro_batches + 10 + 7 for sends in sends_on)
    under_way = [min(num_ranks - rank, micro_batches) for rank in range(num_ranks)]
    ways = [2 * sends + (rank > 0) for rank, sends in enumerate(sends_on)]
    assert other == tuple(100 * n + 10 + 7 + 3 * m for n, m in zip(under_way, ways))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_gradients_and_sent_buffers_remain_at_the_end(schedule: str) -> None:
    """Each saved value is freed: the last action finds only its own values."""
    order = _order(schedule, 2, 8)
    last = [ranked[-1] for ranked in _equal(order).ranks]
    for r in last:
        stages = {a.stage for a in order.ranks[r.rank]}
        kept = 60 if r.action.work is ActionKind.BACK_TO_WEIGHTS else 100
        away = {s for s, rank in order.rank_of.items() if rank != r.rank}
        ways = sum((s + step) in away for s in stages for step in (1, -1))
        sent = 3 * (ways * 8 if order.holds_sends else ways + 1)
        assert r.held_bytes <= kept + 10 + 7 * len(stages) + sent, r


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_kept_by_two_stages_of_a_rank_count_once(schedule: str) -> None:
    """It is held until the later of both is done with it; on two ranks, each has its own."""
    order = _order(schedule, 2, 8)
    folded = schedule in ("ZBVZeroBubble", "DualPipeV")
    for for_weights in (False, True):
        found = []
        for same in (True, False):
            # Each stage keeps 40 more bytes: one value for all stages, or one for each.
            more = [{"all's" if same else f"{s}'s": 40} for s in range(order.num_stages)]
            found.append(
                replay(
                    order,
                    [
                        replace(
                            _cost(1, 1, 1),
                            kept={f"{s}": 100} | each,
                            kept_between={f"{s} between": 60} | (each if for_weights else {}),
                        )
                        for s, each in enumerate(more)
                    ],
                )
            )
        once, twice = found
        for rank, (one, other) in enumerate(zip(twice.ranks, once.ranks, strict=True)):
            less = [a.held_bytes - b.held_bytes for a, b in zip(one, other, strict=True)]
            # The value is held once less for each micro-batch that both stages of a rank have in
            # flight.
            assert {own % 40 for own in less} == {0}
            assert min(less) >= 0
            assert (max(less) > 0) == (folded and rank == 1)
            assert less[-1] <= 40


def test_values_sent_kept_and_received_again_count_once() -> None:
    """On rank 1 of a V-shaped pipeline, stages 1 and 2 keep one value, which stage 2 also sends
    to stage 3."""
    order = _order("ZBVZeroBubble", 2, 8)
    value = {"value": 50}
    stages = [
        replace(_cost(1, 1, 1), kept={f"{s}": 100}, sends=value if s == 2 else {}, sends_back={})
        for s in range(4)
    ]
    sending = replay(order, stages).ranks[1]
    stages[1] = replace(stages[1], kept={"1": 100} | value)
    stages[2] = replace(stages[2], kept={"2": 100} | value, receives=value)
    keeping = replay(order, stages).ranks[1]
    sent = 0
    for plain, other in zip(sending, keeping, strict=True):
        # The value of the micro-batches that stage 2 has sent is kept in both cases.
        assert other.held_bytes - plain.held_bytes <= 50 * (8 - sent)
        sent += str(plain.action).startswith("2F")
    assert sending[-1].held_bytes == keeping[-1].held_bytes


@pytest.mark.parametrize("schedule", _PER_RANK)
def test_messages_through_host_memory_take_device_memory_while_read(schedule: str) -> None:
    order = _order(schedule, 2, 8)
    alone = replace(_cost(1, 1, 1), sends={}, sends_back={})
    ends = [
        replace(alone, sends={"on": 3}, receives_back={"back": 3}),
        replace(alone, receives={"on": 3}, sends_back={"back": 3}),
    ]

    def actions(stages: list[StageCost], *, is_by_host: bool = False) -> list[Replayed]:
        played = replay(order, stages, is_by_host=is_by_host)
        return [done for rank in played.ranks for done in rank]

    by_host, waiting = actions(ends, is_by_host=True), actions(ends)
    for none, less, more in zip(actions([alone] * 2), by_host, waiting, strict=True):
        reads = less.action.work is (ActionKind.FORWARD if less.rank else ActionKind.BACKWARD)
        assert less.held_bytes - none.held_bytes == (3 if reads else 0), less.action
        assert more.held_bytes >= less.held_bytes
    assert any(a.held_bytes > b.held_bytes for a, b in zip(waiting, by_host, strict=True))


def test_overlapping_actions_are_listed_sequentially() -> None:
    assert list(map(str, actions_of(["(0F2;1B1)OVERLAP_F_B", "", "1W3"]))) == ["0F2", "1B1", "1W3"]


def test_an_action_receives_from_the_adjacent_stage_on_another_rank() -> None:
    order = stored_order("ZBVZeroBubble", num_ranks=2, num_stages=4, micro_batches=8)
    sources = {str(a): source_of(a, order.rank_of) for a in order.ranks[1]}
    read = {sources[f"1{work}0"] for work in "FI"} | {sources[f"2{work}0"] for work in "FI"}
    assert read == {0, None, 3}  # stages 1 and 2 are on this rank
    assert (sources["1F0"], sources["1I0"], sources["2F0"], sources["2I0"]) == (0, None, None, 3)
    assert sources["1W0"] is None


def test_an_invalid_cell_is_refused() -> None:
    with pytest.raises(PlanFileError, match="0X1"):
        actions_of(["0F0", "0X1"])
