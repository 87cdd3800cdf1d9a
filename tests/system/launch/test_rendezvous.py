"""The rank of a process, the consistency of ranks, and a rendezvous under torchrun itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from steelyard.comm.network_interfaces import address_towards, interface_of
from steelyard.errors import BadInput, Mismatch, RankFailed, RanksDiffer
from steelyard.run.launch.consistency_check import agree, first_difference, words_for
from steelyard.run.launch.environment import RankInfo, rank_info
from steelyard.run.launch.network_interface import set_interface_between_hosts
from steelyard.run.launch.rendezvous import joined
from tests.system.launch.one import STEPS

ROOT = Path(__file__).resolve().parents[3]

# --- the rank of this process ---------------------------------------------------------------------

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[03-05,9],other",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "1",
}


def test_a_process_without_variables_is_alone() -> None:
    assert rank_info({"PATH": "/bin", "MASTER_ADDR": "host"}) == RankInfo(rank=0, size=1)


def test_under_torchrun() -> None:
    who = rank_info(TORCHRUN)
    assert (who.rank, who.size, who.local_rank, who.attempt) == (3, 8, 1, 2)
    assert (who.address, who.port, who.agent_holds_store) == ("10.0.0.1", 29500, True)


def test_torchrun_takes_precedence_over_srun() -> None:
    assert rank_info({**SRUN, **TORCHRUN, "RANK": "5"}).rank == 5


def test_under_srun() -> None:
    who = rank_info(SRUN)
    assert (who.rank, who.size, who.local_rank, who.address) == (3, 8, 1, "node03")
    assert who.port == rank_info({**SRUN, "SLURM_PROCID": "0"}).port
    assert who.port != rank_info({**SRUN, "SLURM_STEP_ID": "2"}).port
    told = rank_info({**SRUN, "MASTER_ADDR": "elsewhere", "MASTER_PORT": "7"})
    assert (told.address, told.port) == ("elsewhere", 7)


def test_a_batch_script_that_is_not_under_srun_is_alone() -> None:
    alone = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert rank_info(alone) == RankInfo()


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-4]", "node1"),
        ("rack-a[010,012]-ib", "rack-a010-ib"),
        ("a.b.c", "a.b.c"),
    ],
)
def test_first_host_of_slurms_short_form(hosts: str, first: str) -> None:
    assert rank_info({**SRUN, "SLURM_STEP_NODELIST": hosts}).address == first


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "8"},
        {"RANK": "-1"},
        {"RANK": "three"},
        {"RANK": "3\x1b[2J"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": ""},
        {"LOCAL_RANK": "x"},
        {"MASTER_ADDR": ""},
        {"MASTER_PORT": "70000"},
        {"MASTER_PORT": ""},
    ],
)
def test_variables_that_make_no_sense_are_refused(wrong: Mapping[str, str]) -> None:
    with pytest.raises(BadInput) as refused:
        rank_info({**TORCHRUN, **wrong})
    assert str(refused.value).count("\n") == 2
    assert "\x1b" not in str(refused.value)


def test_half_of_the_variables_are_refused() -> None:
    for missing in ("RANK", "WORLD_SIZE"):
        with pytest.raises(BadInput):
            rank_info({name: value for name, value in TORCHRUN.items() if name != missing})


def test_a_plan_for_four_ranks_is_not_run_on_two() -> None:
    RankInfo(size=4).check_size(4)
    with pytest.raises(Mismatch, match="for 4 ranks, but 2"):
        RankInfo(size=2).check_size(4)


def test_the_number_of_hosts_is_that_of_the_launcher() -> None:
    assert rank_info(TORCHRUN).hosts == 1
    assert rank_info({**TORCHRUN, "GROUP_WORLD_SIZE": "4"}).hosts == 4
    assert rank_info({**SRUN, "SLURM_STEP_NUM_NODES": "8"}).hosts == 8


def test_a_host_is_reached_over_the_routed_interface() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("") == interface_of("192.0.2.1") == ""
    assert address_towards("no such host.invalid") == ""


@pytest.mark.parametrize("own", ["", "lo7"])
def test_the_first_host_uses_the_interface_to_the_second_unless_set_by_the_user(own: str) -> None:
    store, given = HashStore(), {"GLOO_SOCKET_IFNAME": own} if own else {}
    environs = [dict(given), dict(given)]
    for rank in (1, 0):
        # The first host's name resolves to its own loopback, as on many machines.
        who = RankInfo(rank=rank, size=2, hosts=2, address="127.0.0.1")
        set_interface_between_hosts(store, who, environs[rank])
    assert environs == [{"GLOO_SOCKET_IFNAME": own or "lo"}] * 2


def test_all_ranks_of_the_first_host_use_the_interface_to_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the first host, its own name may resolve to loopback, for any of its ranks."""
    store, asked = HashStore(), list[str]()

    def towards(host: str) -> str:
        asked.append(host)
        return {"alpha": "10.0.0.2", "10.0.0.2": "10.0.0.1"}[host]

    module = "steelyard.run.launch.network_interface"
    monkeypatch.setattr(f"{module}.address_towards", towards)
    monkeypatch.setattr(f"{module}.interface_of", lambda address: f"one {address}")
    for rank in (3, 2, 1, 0):
        who = RankInfo(rank=rank, size=4, hosts=2, local_rank=rank % 2, address="alpha")
        set_interface_between_hosts(store, who, environ := {})
        # Each host uses the address of its own interface on the way there.
        expected = "10.0.0.2" if rank >= 2 else "10.0.0.1"
        assert environ == {"GLOO_SOCKET_IFNAME": f"one {expected}"}, rank


def test_a_rank_alone_needs_no_group() -> None:
    with joined(RankInfo(), {}, timeout_seconds=1):
        assert not torch.distributed.is_initialized()


# --- the model and plan of each rank --------------------------------------------------------------


def held(rows: int = 4, dtype: torch.dtype = torch.float32, plan: str = "7f3c") -> dict[str, str]:
    parameters = [("a.weight", torch.empty(rows, 3, dtype=dtype)), ("a.bias", torch.empty(4))]
    return words_for(plan_digest=plan, parameters=parameters, batch=[("x", torch.empty(8, 3))])


def all_agree(
    words: list[dict[str, str]], sizes: list[int] | None = None, *, seconds: float = 60
) -> list[BaseException | None]:
    """Return the outcome of each of these ranks, which are threads here."""
    store = HashStore()
    found: list[BaseException | None] = [None] * len(words)

    def one(rank: int) -> None:
        who = RankInfo(rank=rank, size=sizes[rank] if sizes else len(words))
        try:
            agree(store, who, words[rank], timeout_seconds=seconds)
        except Exception as error:  # noqa: BLE001 - it is what is asked for
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(words))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_with_equal_values_agree() -> None:
    assert all_agree([held()] * 4) == [None] * 4


@pytest.mark.parametrize(
    ("odd", "item", "said"),
    [
        (held(plan="8a"), "plan", "8a and 7f3c"),
        (held(rows=5), "parameters", "a.weight float32 [5, 3] and a.weight float32 [4, 3]"),
        (held(dtype=torch.float16), "parameters", "a.weight float16 [4, 3]"),
        ({**held(), "torch": "2.12"}, "torch", "2.12"),
        ({**held(), "batch": "x float32 [7, 3]"}, "batch", "x float32 [7, 3]"),
        ({**held(), "batch": ""}, "batch", "nothing and x float32"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_differing_rank_of_three_is_named_by_all(
    odd: dict[str, str], item: str, said: str, rank: int
) -> None:
    words = [held(), held(), held()]
    words[rank] = odd
    for error in all_agree(words):
        assert isinstance(error, RanksDiffer)
        assert (error.rank, error.item) == (rank, item)
        assert said in error.happened


def test_of_two_differing_ranks_the_second_is_named() -> None:
    for error in all_agree([held(rows=5), held()]):
        assert isinstance(error, RanksDiffer)
        assert error.rank == 1


def test_a_wrong_number_of_ranks_is_reported_without_waiting() -> None:
    for error in all_agree([held(), held()], [2, 4]):
        assert isinstance(error, RanksDiffer)
        assert error.item == "number of ranks"


def test_a_missing_rank_is_named() -> None:
    (error,) = all_agree([held()], [2], seconds=0.2)
    assert isinstance(error, RankFailed)
    assert (error.rank, error.cause) == (1, "absent")


@given(st.lists(st.sampled_from("abc"), max_size=5), st.lists(st.sampled_from("abc"), max_size=5))
def test_differing_values_are_shown(here: list[str], there: list[str]) -> None:
    if "\n".join(here) != "\n".join(there):
        mine, theirs = first_difference("\n".join(here), "\n".join(there))
        assert mine != theirs


# --- torchrun itself ------------------------------------------------------------------------------


@pytest.fixture
def environ() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


@pytest.mark.dist
@pytest.mark.slow
def test_under_torchrun_a_killed_rank_costs_one_restart(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    script = str(Path(__file__).with_name("one.py"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [sys.executable, *torchrun, "--max-restarts=3", script, str(tmp_path), "kill once", "60"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    tries = [pair.split(":") for pair in (tmp_path / "steps-0").read_text().split()]
    assert [int(step) for _, step in tries] == list(range(STEPS))
    assert {attempt for attempt, _ in tries} == {"0", "1"}
