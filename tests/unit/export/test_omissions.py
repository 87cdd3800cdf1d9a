"""Everything that a tool's settings lose against a plan is said by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.errors import BadInput
from steelyard.export.omissions import omissions
from steelyard.export.target import ExportTarget, settings_for
from steelyard.plans.plan import Decisions
from tests.unit.export.plans import CASES, DATA, PIPELINE, TENSOR, decided

TOOLS = tuple(target for target in ExportTarget if not target.is_launcher)


def lost(target: ExportTarget, decisions: Decisions) -> str:
    return "\n".join(omissions(decisions, settings_for(target, decisions), target.abilities))


@pytest.mark.parametrize("target", TOOLS)
def test_single_values_become_blocks(target: ExportTarget) -> None:
    said = lost(target, CASES["micro-batches"])
    assert said == "recompute of 8 single values: each block is recomputed as a whole"


def test_what_one_tool_has_another_loses() -> None:
    assert lost(ExportTarget.TORCHTITAN, CASES["chunked"]) == ""
    assert lost(ExportTarget.TRAINER, CASES["chunked"]) == (
        "chunk: aten.mm.default in head, 3 slices"
    )
    assert "compilation" in lost(ExportTarget.DEEPSPEED, CASES["compiled"])
    assert lost(ExportTarget.FSDP2, CASES["compiled"]) == ""
    offload = "offload of 4 single values"
    kept = ": what the blocks save is in host memory"
    assert f"{offload}{kept}" in lost(ExportTarget.TRAINER, CASES["offload"])
    assert lost(ExportTarget.ACCELERATE, CASES["offload"]).endswith(offload)


def test_sharding_is_coarser() -> None:
    said = lost(ExportTarget.FSDP2, CASES["sharded, offloaded"])
    assert "shard_states of 4 parameters: all parameters are sharded" in said
    assert "offload_state of optimizer of blocks.*.weight (4): that of all parameters" in said
    assert "shares of 2 : 1: all ranks get the same" in lost(
        ExportTarget.TRAINER, replace(CASES["unequal"], target=decided(batch=6).target)
    )
    assert "shard_tensor of blocks.*.weight by dim 0" in lost(ExportTarget.ACCELERATE, TENSOR)
    assert "shard_pipeline behind blocks.1: the tool cuts" in lost(
        ExportTarget.TORCHTITAN, PIPELINE
    )


@pytest.mark.parametrize("target", TOOLS)
def test_lossy_and_timing_trades_are_lost_by_name(target: ExportTarget) -> None:
    assert "quantized_gradients: " in lost(target, CASES["lossy"])
    assert "overlap: window 5" in lost(target, CASES["data"])


@pytest.mark.parametrize("target", TOOLS)
def test_a_layout_that_a_tool_lacks_is_refused_in_three_lines(target: ExportTarget) -> None:
    for decisions, trade, able in (
        (TENSOR, "shard_tensor", ("accelerate", "torchtitan")),
        (PIPELINE, "shard_pipeline", ("torchtitan",)),
    ):
        if target.value in able:
            assert settings_for(target, decisions).layout.num_ranks == decisions.target.ranks
            continue
        with pytest.raises(BadInput, match=trade) as refused:
            settings_for(target, decisions)
        assert len(str(refused.value).splitlines()) == 3
        assert able[-1] in refused.value.remedy


def test_the_choice_of_ranks_and_their_speeds_are_lost() -> None:
    decisions = decided(DATA, ranks=3)
    decisions = replace(
        decisions, used_ranks=(0, 2), target=replace(decisions.target, speeds=(1.0, 0.1, 0.5))
    )
    said = lost(ExportTarget.TRAINER, decisions)
    assert "the choice of ranks 0, 2" in said
    assert "the speeds of the ranks" in said
