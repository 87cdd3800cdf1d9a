"""Ranks of a pipeline draw the numbers that one device would, in any order of ranks and stages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from steelyard.ir.pipeline_schedule import ActionKind, Order
from steelyard.ir.pipeline_stages import PipelineStages
from steelyard.predict.pipeline.rng_cost import STATE_BYTES, states_bytes
from steelyard.run.pipeline.rng import Draws, _draw_call, _final_states, _skip_call
from tests.harness import Trial
from tests.torch.trades.test_shard_pipeline import applied, offered

pytestmark = pytest.mark.slow
_SEED = 7


def pipelines() -> Iterator[tuple[str, PipelineStages, Order]]:
    for schedule, rules in offered(2).items():
        program = applied(*rules, micro_batches=4)
        assert program.pipeline is not None
        yield schedule, program.pipeline.stages, program.pipeline.order


def test_a_stage_starts_with_the_random_state_of_one_device() -> None:
    for schedule, stages, order in pipelines():
        everywhere = Draws(stages, own=())
        torch.manual_seed(_SEED)
        torch.randn(3)  # leaves one drawn number unused
        begun = torch.get_rng_state()
        expected = {}
        for micro_batch in range(order.num_micro_batches):
            for stage in stages.stages:
                expected[micro_batch, stage.index] = torch.get_rng_state()
                for draw in everywhere._stages[stage.index]:
                    draw()
        end = torch.get_rng_state()
        assert not torch.equal(begun, end)
        for rank, actions in enumerate(order.ranks):
            own = {stage for stage, holder in order.rank_of.items() if holder == rank}
            draws, most = Draws(stages, own=own), 0
            torch.set_rng_state(begun)
            draws.begin(order.num_micro_batches)
            for action in actions:
                if action.work is not ActionKind.FORWARD:
                    continue
                was_kept = (action.micro_batch, action.stage) in draws._saved_states
                most = max(most, len(draws._saved_states) + was_kept)
                with draws.at(action.micro_batch, action.stage):
                    most = max(most, len(draws._saved_states) + was_kept)
                    if draws._stages[action.stage]:
                        wanted = expected[action.micro_batch, action.stage]
                        assert torch.equal(torch.get_rng_state(), wanted), (schedule, action)
                    for draw in everywhere._stages[action.stage]:
                        draw()
            draws.end()
            assert torch.equal(torch.get_rng_state(), end), schedule
            held = states_bytes(stages.stages, order, rank)
            assert held - STATE_BYTES <= most * STATE_BYTES <= held, (schedule, rank)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: nn.functional.dropout(x, 0.3),
        lambda x: x + torch.randn_like(x),
        lambda x: x + torch.randn(2, 7),
        lambda x: x + torch.rand(300, 300).sum(),
        lambda x: x[torch.randperm(4)[:2]],
    ],
)
def test_skipping_random_numbers_equals_drawing_them(draw: object) -> None:
    model = nn.Linear(7, 7)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        assert callable(draw)
        drawn: Tensor = draw(model(batch))
        return drawn.sum()

    graph = Trial(model, loss, torch.randn(2, 7)).source.graph(micro_batches=1)
    (node,) = (n for n in graph.nodes if n.is_random)
    own, passing = _draw_call(graph, node), _skip_call(graph, node)
    assert _final_states(passing) == _final_states(own)
    torch.manual_seed(_SEED)
    before = torch.get_rng_state()
    _final_states(passing)
    assert torch.equal(torch.get_rng_state(), before), "a try leaves nothing behind"
