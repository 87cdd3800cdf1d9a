"""The memory floor of a step is below every plan, and its refusal lists its parts."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.capture.step import CapturedStep
from steelyard.errors import Infeasible
from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT, Device, Link
from steelyard.ir.parallel_layout import DATA, PIPELINE, TENSOR
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.plans.budget import Budget
from steelyard.predict.cost_table import CostTable
from steelyard.search import Floor, LayoutSearch, StepSearch
from steelyard.trades import TRADES
from tests.support.graphs import Whole, random_step
from tests.support.short_search import looking_less_far
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

MIB = 1 << 20
DEVICE = Device(kind="made up", flops_per_second=1e9, bytes_per_second=1e8, memory_bytes=1 << 40)
LINK = Link(kind="declared", latency_seconds=1e-3, bytes_per_second=1e8)
FAR = Link(kind="offload memory", latency_seconds=1e-5, bytes_per_second=1e9)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(min_value=0, max_value=10**6), room=st.sampled_from([0, 1 << 14, 1 << 24]))
def test_no_plan_of_a_random_step_is_below_the_memory_floor(seed: int, room: int) -> None:
    graph = random_step(seed)
    program = Program.plain(graph)
    links = {OFFLOAD_OUT: FAR, OFFLOAD_IN: FAR} if room else {}
    costs = CostTable(device=DEVICE, links=links, offload_bytes=room)
    with looking_less_far():
        least = StepSearch(program, trades=TRADES, source=Whole(graph), costs=costs).least_bytes(
            enough_bytes=0
        )
    assert Floor.of(program).least_bytes(offload_bytes=room) <= least


@pytest.mark.slow
@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1)])
@pytest.mark.parametrize("room", [0, MIB // 4, 1 << 40])
def test_no_plan_of_a_model_is_below_the_memory_floor(
    make: type[torch.optim.Optimizer], room: int
) -> None:
    source, program = _step(make)
    links = {OFFLOAD_OUT: FAR, OFFLOAD_IN: FAR} if room else {}
    costs = CostTable(device=DEVICE, links=links, offload_bytes=room)
    with looking_less_far():
        search = StepSearch(program, trades=TRADES, source=source, costs=costs)
        search.explore_all()
        least = min(point.memory_bytes for point in search.frontier())
    floor = Floor.of(program)
    assert floor.least_bytes(offload_bytes=room) <= least
    if not room:
        # The bound is not trivial: weights, gradients and state are most of such a small step.
        assert floor.least_bytes() > 0.5 * least


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_plan_on_ranks_is_below_the_memory_floor(ranks: int) -> None:
    source, program = _step(torch.optim.AdamW)
    costs = CostTable(device=DEVICE, links={DATA: LINK, TENSOR: LINK, PIPELINE: LINK})

    def searching(layout: tuple[Rule, ...]) -> StepSearch:
        return StepSearch(program, trades=TRADES, source=source, costs=costs, layout=layout)

    layouts = LayoutSearch(
        program, trades=TRADES, source=source, costs=costs, num_ranks=ranks, searching=searching
    )
    held = [way.nbytes for layout in layouts.layouts for way in layouts.candidates.of(layout)]
    held += [way.nbytes for staged in layouts.pipelines.values() for way in staged.candidates]
    floor = Floor.of(program).least_bytes(ranks=ranks)
    assert len(held) > len(layouts.layouts)
    assert floor <= min(held)


def _step(make: type[torch.optim.Optimizer]) -> tuple[CapturedStep, Program]:
    model = GPT(layers=2, width=64, heads=2, vocabulary=256, length=32, fused=True)
    source = CapturedStep(
        model=model, loss=next_token_loss, batch=tokens(4, 32, 256), optimizer=make
    )
    return source, Program.plain(source.graph(micro_batches=1), update=source.update())


WEIGHTS = Floor(
    parameter_bytes=20 * MIB, buffer_bytes=0, batch_bytes=8192, gradient_bytes=20 * MIB,
    state_bytes=40 * MIB,
)  # fmt: skip


def test_a_refusal_lists_the_tensors_that_stay_in_memory() -> None:
    with pytest.raises(Infeasible, match=r"memory <= 50\.0 MiB: .* at least 80\.0 MiB") as refused:
        WEIGHTS.check(Budget(memory="50 MiB"))
    said = str(refused.value)
    assert len(said.splitlines()) == 3
    assert "parameters 20.0 MiB, gradients 20.0 MiB, optimizer state 40.0 MiB" in said
    assert "the batch 8.00 KiB" in said
    assert "an optimizer with less state" in refused.value.remedy
    assert "--offload-dir" in refused.value.remedy


def test_offload_memory_and_ranks_lower_the_memory_floor() -> None:
    assert WEIGHTS.least_bytes(offload_bytes=1 << 40) == 8192
    assert WEIGHTS.least_bytes(ranks=4) == 20 * MIB + 2048
    WEIGHTS.check(Budget(memory="50 MiB"), ranks=2)
    WEIGHTS.check(Budget(memory="50 MiB"), offload_bytes=40 * MIB)
    with pytest.raises(Infeasible, match="on each of 2 ranks"):
        WEIGHTS.check(Budget(memory="39 MiB"), ranks=2)
    with pytest.raises(Infeasible, match=r"with 10\.0 MiB in offload memory") as refused:
        WEIGHTS.check(Budget(memory="50 MiB"), offload_bytes=10 * MIB)
    assert "larger offload memory" in refused.value.remedy


def test_a_budget_equal_to_the_floor_is_not_refused() -> None:
    least = WEIGHTS.least_bytes()
    WEIGHTS.check(Budget(memory_bytes=least))
    WEIGHTS.check(Budget())
    with pytest.raises(Infeasible):
        WEIGHTS.check(Budget(memory_bytes=least - 1))


def test_a_refused_amount_without_a_unit_names_the_unit_as_remedy() -> None:
    with pytest.raises(Infeasible) as refused:
        WEIGHTS.check(Budget(memory="40"))
    assert "with its unit" in refused.value.remedy
    large = replace(WEIGHTS, batch_bytes=1 << 30)
    with pytest.raises(Infeasible) as refused:
        large.check(Budget(memory="50 MiB"))
    assert "a smaller batch" in refused.value.remedy
