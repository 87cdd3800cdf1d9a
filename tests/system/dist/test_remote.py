"""Slots written by NIXL, as between hosts: values, memory and errors.

They use TCP on one machine, because no RDMA device is available, and speed is not tested.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.system.dist.pipelines import MICRO_BATCHES, STEPS
from tests.system.dist.ranks import on_ranks, on_two_ranks
from tests.system.dist.test_pipelines import as_one_device
from tests.system.dist.test_slots import check_who_died

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("nixl_cu12") is None and find_spec("nixl_cu13") is None,
        reason="NIXL is not installed: pip install 'steelyard[rdma]'",
    ),
]


@pytest.fixture(autouse=True)
def _over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exclude the shared memory that processes of one host could use."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


def test_more_messages_than_slots_arrive_unchanged() -> None:
    for rank in on_two_ranks("tests.system.dist.remote:exchanged"):
        # No buffer for sent messages stays allocated either.
        assert rank == {"wrong": [], "changed": [], "moved": True, "held": False, "left open": []}


def test_receiving_a_message_allocates_no_memory() -> None:
    assert on_two_ranks("tests.system.dist.remote:kept_away") == [{"peak": 0, "left": 0}] * 2


def test_values_computed_in_their_slot_are_not_copied() -> None:
    one, other = on_two_ranks("tests.system.dist.remote:made_there")
    assert one["came"]
    assert other["came"]
    assert one["places"] == {
        "at first": True,
        "of another message": False,
        "of its second value": True,
        "after one that was given up": True,
    }


def test_messages_of_a_failed_step_are_dropped() -> None:
    assert on_two_ranks("tests.system.dist.remote:broken_off") == [[True, True]] * 2


def test_rdma_is_chosen_between_hosts_only_if_all_ranks_support_it() -> None:
    for rank in on_two_ranks("tests.system.dist.remote:chosen"):
        assert rank == {"one host": "SharedMemoryTransport", "two hosts": "RdmaTransport"} | {
            "one is not able": "SharedMemoryTransport"
        }


def test_an_unreachable_host_is_named_on_all_ranks() -> None:
    one, other = on_two_ranks("tests.system.dist.remote:refused")
    assert one == other
    assert "on rank 1, its NIXL proxy process failed: nixlBackendError" in one["no agent"]
    assert "its NIXL proxy process failed: OSError: [Errno 99]" in one["no way"], "no such address"
    for said in one.values():
        assert len(said.rstrip().splitlines()) == 3, said
        assert "/memfd" not in said, "what was made stays open"
        assert "pipe:" not in said, "a pipe stays open"


@pytest.mark.parametrize("count", [2, 3])
def test_hosts_measure_the_rate_of_remote_writes(count: int) -> None:
    """The third rank takes no part in messages between the other two."""
    for rank in on_ranks("tests.system.dist.remote:measured", count=count):
        assert {"slot small", "slot large", "slot hand", "slot copy", "slotted middle"} < {*rank}


def test_a_proxy_asked_to_stop_continues_until_its_rank_has_ended() -> None:
    assert on_two_ranks("tests.system.dist.remote:asked_to_stop") == [True, True]


def test_stages_over_remote_writes_equal_one_device() -> None:
    ranks = on_two_ranks("tests.system.dist.remote:staged")
    assert set(ranks[0]) == {
        "1F1B", "1F1B through slots", "ZBVZeroBubble", "ZBVZeroBubble through slots"
    }  # fmt: skip
    for schedule in ranks[0]:
        as_one_device("gpt", schedule, [rank[schedule] for rank in ranks])
        if "through slots" in schedule:
            made = sum(rank[schedule]["made there"] for rank in ranks)
            assert made >= STEPS * MICRO_BATCHES, schedule


def test_a_silent_rank_is_waited_for_until_the_group_timeout() -> None:
    said, _ = on_two_ranks("tests.system.dist.remote:silent")
    assert said.startswith("no message from rank 1 within 1")


def test_a_rank_that_dies_while_using_a_slot_is_named(tmp_path: Path) -> None:
    check_who_died("tests.system.dist.remote", tmp_path)
