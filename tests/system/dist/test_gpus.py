"""Ranks on GPUs: messages through GPU memory, and the results of pipelined steps.

All ranks share one GPU, so that one is enough.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.system.dist.pipelines import MICRO_BATCHES, STEPS
from tests.system.dist.ranks import on_ranks
from tests.system.dist.test_meet import check_met
from tests.system.dist.test_pipelines import as_one_device
from tests.system.dist.test_slots import check_who_died

pytestmark = [pytest.mark.dist, pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _there_is_one() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")


def test_more_messages_than_slots_arrive_unchanged() -> None:
    for rank in on_ranks("tests.system.dist.slots:exchanged", count=2, device="cuda"):
        assert rank == {"wrong": [], "changed": [], "moved": True, "held": True, "left open": []}


def test_receiving_a_message_allocates_no_memory() -> None:
    ranks = on_ranks("tests.system.dist.slots:kept_away", count=2, device="cuda")
    assert ranks == [{"peak": 0, "left": 0}] * 2


def test_values_computed_in_their_slot_are_not_copied() -> None:
    one, other = on_ranks("tests.system.dist.slots:made_there", count=2, device="cuda")
    assert one["came"]
    assert other["came"]
    assert one["places"]["at first"]
    assert one["places"]["after one that was given up"]


def test_messages_of_a_failed_step_are_dropped() -> None:
    ranks = on_ranks("tests.system.dist.slots:broken_off", count=2, device="cuda")
    assert ranks == [[True, True]] * 2


def test_a_rank_that_dies_while_using_a_slot_is_named(tmp_path: Path) -> None:
    check_who_died("tests.system.dist.slots", tmp_path, device="cuda")


def test_hosts_measure_the_link_between_their_gpus() -> None:
    """NCCL takes each rank for one of another host."""
    check_met(*on_ranks("tests.system.dist.meet:measuring", count=2, device="cuda"))


@pytest.mark.parametrize("count", [2, 3])
def test_all_reduces_equal_those_of_torch(count: int) -> None:
    ranks = on_ranks("tests.system.dist.slotted:as_torchs", count=count, device="cuda")
    for rank in ranks:
        assert rank["bitwise"] or count > 2
        assert rank["off"] <= 1e-6 if count == 2 else rank["off"] <= 0.02
        assert rank["alike"]
        assert rank["moved"] > 0


def test_a_pipelined_step_equals_that_of_one_device() -> None:
    ranks = on_ranks("tests.system.dist.pipelines:two_of_gpt_on_gpus", count=2, device="cuda")
    assert sum("through slots" in schedule for schedule in ranks[0]) == 4
    for schedule in ranks[0]:
        as_one_device("gpt", schedule, [rank[schedule] for rank in ranks])
        if "through slots" in schedule:
            made = sum(rank[schedule]["made there"] for rank in ranks)
            assert made >= STEPS * MICRO_BATCHES, schedule


def test_measured_peak_of_each_rank_is_the_predicted_one() -> None:
    for rank in on_ranks("tests.system.dist.pipelines:peaks_of_gpt", count=2, device="cuda"):
        for schedule, (predicted, metered) in rank.items():
            # Messages that gloo receives stay on the host until they are read, and a GPU's
            # allocator allocates at least 512 bytes.
            assert 0.93 * predicted <= metered <= 1.02 * predicted, schedule
