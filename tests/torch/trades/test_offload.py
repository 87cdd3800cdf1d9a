"""Offloaded activations of real models: the same bits, and the predicted peak."""

from __future__ import annotations

import pytest
import torch

from steelyard.ir.program import Program
from steelyard.ir.saved_activations import saved_for_backward
from steelyard.trades.chunk import Chunk
from steelyard.trades.offload import with_transfers
from tests.harness import Trial, costs_of, far_memory, predicted_above, trial_of
from tests.torch.trades.test_chunk import LOSSES, Scores, ids
from tests.zoo.workers import on_its_worker


@pytest.mark.slow
@pytest.mark.parametrize("name", [on_its_worker(n) for n in ("gpt", "resnet_bn", "hf_llama")])
def test_values_are_offloaded_in_every_micro_batch(name: str) -> None:
    tried = trial_of(name)
    if tried.source.why_not_split():
        parts = tried.plain
    else:
        parts = Program.plain(tried.source.graph(micro_batches=2)).repeated(2)
    able = sorted(saved_for_backward(parts))
    program = with_transfers(parts, dict.fromkeys(able, (2, 2)))
    before = far_memory().moved_bytes
    outcome = tried.run(program)
    assert outcome.difference(tried.run(parts)) is None
    # One step to warm up, and one metered step.
    assert far_memory().moved_bytes - before == 2 * program.sent_bytes
    predicted = predicted_above(program, costs_of(program.graph))
    assert outcome.peak_bytes == pytest.approx(predicted, abs=64)


@pytest.mark.slow
def test_results_of_sliced_loops_can_be_offloaded() -> None:
    torch.manual_seed(0)
    tried = Trial(Scores(), LOSSES["mean"], ids().clamp(min=0))
    offers, _ = Chunk().offers(tried.plain, tried.source)
    streamed = Chunk().rewrite(tried.plain, offers[-1].rules, tried.source)
    able = saved_for_backward(streamed)
    given = {n.name for n in streamed.graph.forward() if _is_given(streamed, n.name)}
    assert able & given
    program = with_transfers(streamed, dict.fromkeys(sorted(able), (1, 1)))
    assert tried.run(program).difference(tried.run(streamed)) is None


def _is_given(program: Program, name: str) -> bool:
    node = program.graph.by_name[name]
    return node.is_getitem and program.graph.by_name[node.inputs[0]].body is not None
