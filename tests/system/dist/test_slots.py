"""Messages through memory that two ranks share arrive unchanged; if this is impossible, all
ranks get the reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.dist.ranks import on_two_ranks

pytestmark = pytest.mark.dist

_ROOT = Path(__file__).resolve().parents[3]


def test_more_messages_than_slots_arrive_unchanged() -> None:
    for rank in on_two_ranks("tests.system.dist.slots:exchanged"):
        assert rank == {"wrong": [], "changed": [], "moved": True, "held": True, "left open": []}


def test_receiving_a_message_allocates_no_memory() -> None:
    assert on_two_ranks("tests.system.dist.slots:kept_away") == [{"peak": 0, "left": 0}] * 2


def test_values_computed_in_their_slot_are_not_copied() -> None:
    one, other = on_two_ranks("tests.system.dist.slots:made_there")
    assert one == {
        "places": {
            "at first": True,
            "of another message": False,
            "of its second value": True,
            "after one that was given up": True,
        },
        "came": True,
    }
    assert other["came"]


def test_messages_of_a_failed_step_are_dropped() -> None:
    assert on_two_ranks("tests.system.dist.slots:broken_off") == [[True, True]] * 2


def test_the_rank_without_shared_memory_is_named_on_all_ranks() -> None:
    one, other = on_two_ranks("tests.system.dist.slots:refused")
    assert one.keys() == other.keys() == {"another host", "no memory", "not seen"}
    for name, said in one.items():
        assert said.rstrip() == other[name].rstrip()
        assert len(said.strip().splitlines()) == 3, said
        assert "[[shared_memory_transfer]]" in said
        assert "/memfd" not in said, "what was made stays open"
        assert "pipe:" not in said, "a pipe stays open"
    assert "on rank 0, another rank is on another host or in another" in one["another host"]
    assert "on rank 1, 8.00 KiB of shared memory cannot be allocated: Cannot allocate memory" in one["no memory"]
    assert "on rank 0, memory of another rank cannot be opened: No such file" in one["not seen"]


def test_a_silent_rank_is_waited_for_until_the_group_timeout() -> None:
    said, _ = on_two_ranks("tests.system.dist.slots:silent")
    assert said.startswith("no message from rank 1 within 1")
    assert len(said.splitlines()) == 3


def test_a_rank_that_dies_while_using_a_slot_is_named(tmp_path: Path) -> None:
    check_who_died("tests.system.dist.slots", tmp_path)


def test_gpu_ranks_wait_for_pending_kernels_before_sending() -> None:
    """A memory file stands in for the GPU."""
    for rank, found in enumerate(on_two_ranks("tests.system.dist.stood_in:every")):
        nothing_left = {"wrong": [], "changed": [], "moved": True, "held": True, "left open": []}
        assert found["exchanged"] == nothing_left
        assert found["made there"]["came"]
        if rank == 0:
            assert all(found["made there"]["places"][when] for when in _THERE)
        assert found["broken off"] == [True, True]
        assert found["apart"] == [True, True]
        assert "on rank 1, 8.00 KiB of its GPU cannot be shared: full\n" in found["refused"]["no memory"]
        assert "the GPU of rank 1 cannot access all others" in found["refused"]["out of reach"]
        for said in found["refused"].values():
            assert len(said.splitlines()) == 3, said


_THERE = ("at first", "of its second value", "after one that was given up")


def test_a_rank_that_dies_before_its_gpu_has_written_the_slot_is_named(tmp_path: Path) -> None:
    check_who_died("tests.system.dist.stood_in", tmp_path)


def check_who_died(module: str, folder: Path, *, device: str = "cpu") -> None:
    """Check which of the two ranks died; this module is also their command."""
    also = [] if device == "cpu" else [device]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder), str(rank), *also],
            cwd=_ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    printed, _ = (rank.communicate(timeout=120)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL]
    said = json.loads(printed)
    assert said.keys() == {"reading", "sending"}
    for text in said.values():
        assert text.startswith("rank 1 has exited"), text
        assert len(text.splitlines()) == 3
