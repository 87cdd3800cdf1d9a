"""Laws of a search over micro-batches: which are tried and taken, and where the search stops."""

from dataclasses import replace

import pytest

from steelyard.errors import Infeasible
from steelyard.hardware.cluster import Device
from steelyard.ir.graph import Graph
from steelyard.ir.metrics import Estimate
from steelyard.ir.program import Program
from steelyard.plans.budget import Budget
from steelyard.plans.stop_request import StopRequest
from steelyard.predict import least_possible_bytes, peak_bytes, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.search import SearchResult, StepSearch
from steelyard.search.single.explore import Exploration
from steelyard.search.single.search import search
from steelyard.trades import TRADES
from steelyard.trades.recompute import recomputable
from tests.support.graphs import Split, Whole, tower

COSTS = CostTable(
    device=Device(kind="made up", flops_per_second=1e9, bytes_per_second=1e8, memory_bytes=1 << 30)
)


def test_a_variant_that_cannot_win_gets_no_local_search() -> None:
    graph = tower(6)
    exploration = Exploration(Program.plain(graph), COSTS, recomputable(graph))
    tight = round(0.6 * peak_bytes(Program.plain(graph), COSTS))
    assert not exploration.is_near_bound(tight)
    swept = exploration.num_tried
    exploration.improve(tight, StopRequest(), to_beat_seconds=exploration.lower_bound(tight))
    assert exploration.num_tried == swept
    # What was skipped for one plan is done for a slower one.
    exploration.improve(tight, StopRequest())
    assert exploration.num_tried > swept


def test_the_batch_is_split_only_where_that_helps() -> None:
    graph = tower(6)
    source = Split(graph, (1, 2, 4, 8))
    searching = StepSearch(Program.plain(graph), trades=TRADES, source=source, costs=COSTS)
    whole = searching.explored()
    assert searching.find(Budget()).micro_batches == 1
    assert source.asked == [], "nothing is captured where nothing is asked for"
    assert searching.find(Budget(memory_bytes=whole.plain.peak_bytes)).micro_batches == 1
    assert set(source.asked) == {2}, "nothing finer is captured once cutting is slower"
    answer = searching.find(Budget(memory_bytes=whole.least.peak_bytes - 1))
    assert answer.micro_batches > 1
    assert answer.rules[0].micro_batches == answer.micro_batches
    assert answer.prediction.metrics.memory_bytes.value < whole.least.peak_bytes
    assert answer.taken[0].trade == "accumulate"
    assert max(source.asked) == answer.micro_batches or answer.prediction.metrics.step_seconds.value


class Slower(Split):
    """A source in which the operators of parts of the batch take longer in total than those of
    the whole."""

    def is_no_faster(self, *, micro_batches: int, than: int = 1, share: int = 1) -> bool:
        del than, share
        return micro_batches > 1


def test_a_budget_that_the_step_keeps_untraded_is_answered_without_a_long_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = tower(6)
    source = Slower(graph, (1, 2, 4, 8))
    searching = StepSearch(Program.plain(graph), trades=TRADES, source=source, costs=COSTS)
    tight = peak_bytes(Program.plain(graph), COSTS)
    with monkeypatch.context() as patched:
        patched.setattr("steelyard.search.single.explore.LocalSearch", None)
        answer = searching.find(Budget(memory_bytes=tight))
        assert searching.find(Budget(memory_bytes=2 * tight)).rules == ()
        assert searching.find(Budget()).rules == ()
    assert answer.rules == ()
    assert source.asked == [], "no part of the batch is captured or checked"
    assert answer.least_within == 1
    assert {r.trade for r in answer.refused} >= {"recompute", "accumulate"}
    # If the plan breaks a bound, the search runs as before, and the whole curve is still available.
    assert searching.find(Budget(memory_bytes=tight - 1)).rules
    assert searching.find(Budget(memory_bytes=tight)).rules == ()


def test_a_split_that_is_faster_by_rounding_only_is_not_taken() -> None:
    graph = tower(6)
    plain = Program.plain(graph)
    source = Split(graph, (1, 2))
    cut = Program.plain(source.graph(micro_batches=2)).repeated(2)
    alike = step_seconds(plain, COSTS).value / step_seconds(cut, COSTS).value
    for share, taken in ((1 - 1e-13, set()), (0.9, {"accumulate"})):
        costs = replace(COSTS, cut_steps={2: Estimate.exactly(alike * share)})
        searching = StepSearch(plain, trades=TRADES, source=source, costs=costs)
        answer = searching.find(Budget(memory_bytes=1 << 30))
        assert {rule.trade for rule in answer.rules} == taken


class Calibrated(Split):
    """A source whose split takes ``ratio`` times its operators, which a calibration finds out."""

    def __init__(self, graph: Graph, divisors: tuple[int, ...], *, ratio: float) -> None:
        super().__init__(graph, divisors)
        self.cut_steps = {2: Estimate.exactly(1.0)}
        self._ratio = ratio
        self.calibrated: list[int] = []

    def calibrate_split(self, *, micro_batches: int, share: int = 1) -> None:
        if micro_batches > 1:
            self.calibrated.append(micro_batches)
            self.cut_steps[micro_batches] = Estimate.exactly(self._ratio)


def found_with(source: Calibrated, graph: Graph, memory_bytes: int) -> SearchResult:
    costs = replace(COSTS, cut_steps=source.cut_steps)
    searching = StepSearch(Program.plain(graph), trades=TRADES, source=source, costs=costs)
    return searching.find(Budget(memory_bytes=memory_bytes))


def test_a_split_that_is_chosen_is_calibrated_and_kept_if_it_is_fast() -> None:
    graph = tower(6)
    least = least_possible_bytes(Program.plain(graph), COSTS)
    source = Calibrated(graph, (1, 2), ratio=1.001)
    answer = found_with(source, graph, least)
    assert answer.micro_batches == 2
    assert source.calibrated == [2]
    exact = replace(COSTS, cut_steps={2: Estimate.exactly(1.001)})
    assert answer.prediction.metrics.step_seconds == step_seconds(answer.program, exact)


def test_a_split_that_a_calibration_finds_slow_is_not_taken() -> None:
    graph = tower(6)
    plain = peak_bytes(Program.plain(graph), COSTS)
    tight = round(0.8 * plain)
    slow = Calibrated(graph, (1, 2), ratio=50.0)
    answer = found_with(slow, graph, tight)
    assert slow.calibrated == [2], "it was chosen first"
    assert answer.micro_batches == 1
    alone = search(
        Program.plain(graph),
        trades=TRADES,
        source=Whole(graph),
        costs=COSTS,
        budget=Budget(memory_bytes=tight),
    )
    assert answer.prediction.metrics.step_seconds == alone.prediction.metrics.step_seconds


def test_a_split_that_loses_by_its_operators_is_not_calibrated() -> None:
    graph = tower(6)
    source = Calibrated(graph, (1, 2), ratio=1.0)
    source.cut_steps[2] = Estimate.exactly(50.0)
    answer = found_with(source, graph, round(0.8 * peak_bytes(Program.plain(graph), COSTS)))
    assert answer.micro_batches == 1
    assert source.calibrated == []


def test_a_stopped_search_returns_the_best_plan_so_far() -> None:
    graph = tower(6)
    tight = round(0.7 * peak_bytes(Program.plain(graph), COSTS))
    source = Split(graph, (1, 2, 4))
    searching = StepSearch(Program.plain(graph), trades=TRADES, source=source, costs=COSTS)
    stop, better = StopRequest(), list[float]()

    def first_one(seconds: float) -> None:
        assert stop.is_possible
        better.append(seconds)
        stop.is_made = True

    stopped = searching.find(Budget(memory_bytes=tight), on_better=first_one, stop=stop)
    assert stopped.is_stopped
    assert len(better) == 1
    assert stopped.prediction.peak.nbytes <= tight
    assert stopped.prediction.metrics.step_seconds.value == pytest.approx(better[0])
    assert 2 not in source.asked, "no other variant is explored"
    # The same search goes on as if it had not been stopped.
    whole = searching.find(Budget(memory_bytes=tight))
    assert not whole.is_stopped
    anew = search(
        Program.plain(graph), trades=TRADES, source=Split(graph, (1, 2, 4)), costs=COSTS,
        budget=Budget(memory_bytes=tight),
    )  # fmt: skip
    assert whole.prediction.metrics.step_seconds == anew.prediction.metrics.step_seconds


def test_a_search_without_a_plan_is_not_stopped() -> None:
    graph = tower(6)
    stop = StopRequest(is_made=True)
    searching = StepSearch(
        Program.plain(graph), trades=TRADES, source=Split(graph, (1, 2)), costs=COSTS
    )
    least = searching.find(Budget(memory_bytes=1 << 40)).least.nbytes
    answer = searching.find(Budget(memory_bytes=least), stop=stop)
    assert answer.prediction.peak.nbytes <= least
    with pytest.raises(Infeasible):
        searching.find(Budget(memory_bytes=1), stop=StopRequest(is_made=True))


def test_a_batch_that_cannot_be_cut_is_named_where_nothing_fits() -> None:
    graph = tower(4)
    source = Split(graph, (1, 2), reason="BatchNorm in bn counts the whole batch")
    with pytest.raises(Infeasible, match="BatchNorm in bn counts"):
        search(
            Program.plain(graph),
            trades=TRADES,
            source=source,
            costs=COSTS,
            budget=Budget(memory_bytes=graph.resident_bytes(*_ROLES) + 1000),
        )


_ROLES = tuple(type(next(iter(tower(1).storages)).role))
