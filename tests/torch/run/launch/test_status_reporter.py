"""The report of a rank on the exception that ended it, and its answers; there is no other rank."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from steelyard import _torch
from steelyard.comm.gloo import point_to_point as handing
from steelyard.comm.gloo.point_to_point import Note
from steelyard.errors import CheckpointError, Mismatch, RankFailed, RanksDiffer
from steelyard.run.launch import status_reporter as witness
from steelyard.run.launch.environment import RankInfo
from steelyard.run.launch.rank_status import RankProgress, RankStatus
from steelyard.run.launch.run_files import RankFiles, read_whole
from steelyard.run.launch.status_reporter import answer_when_asked, recorded, statement_of

PARTS: dict[str, Any] = {"expected": "e", "remedy": "r"}
LOST = RuntimeError("[/x/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def caused_by(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.fixture
def who(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankInfo:
    monkeypatch.setattr(witness, "_VERDICT_SECONDS", 0)
    return RankInfo(rank=1, size=2, files=RankFiles(path=tmp_path))


def said_of(who: RankInfo, error: BaseException) -> RankStatus | None:
    with pytest.raises(type(error)), recorded(who):
        raise error
    assert who.files is not None
    found = read_whole(who.files.error)
    return RankStatus.of_json(found["steelyard"]) if found else None


def test_collectives_of_torch_and_ours_share_one_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def torchs(group: str, number: int, at_ns: int, *, is_p2p: bool = False) -> dict[str, Any]:
        return {
            "process_group": [group, "any"], "collective_seq_id": number, "is_p2p": is_p2p,
            "time_created_ns": at_ns, "retired": True, "profiling_name": "gloo:all_reduce",
            "input_dtypes": ["Float"], "input_sizes": [[7]],
        }  # fmt: skip

    entries = [torchs("0", 5, 10), torchs("1", 2, 20), torchs("0", 9, 25, is_p2p=True),
               torchs("0", 6, 40)]  # fmt: skip
    ours = [
        Note("0", 3, "all-gather float32 [4]", 30, is_over=True),
        Note("0", 4, "all-gather float32 [8]", 50),
    ]
    monkeypatch.setattr(_torch, "exchanges_issued", lambda: entries)
    monkeypatch.setattr(handing, "LATELY", ours)
    found = witness.progress()
    sums, gathers = "all_reduce Float [7]", "all-gather float32 [{}]"
    assert [(one.group, one.number, one.words) for one in found.lately] == [
        ("0", 5, sums), ("1", 2, sums), ("0", 8, gathers.format(4)), ("0", 9, sums),
        ("0", 10, gathers.format(8)),
    ]  # fmt: skip
    assert {one.group: one.number for one in found.issued} == {"0": 10, "1": 2}
    assert found.is_waiting
    ours[1].is_over = True
    assert not witness.progress().is_waiting


@pytest.mark.parametrize(
    ("error", "of_exchange", "of_memory", "of_input"),
    [
        (ValueError("no"), False, False, False),
        (RuntimeError("shapes do not match"), False, False, False),
        (OSError(errno.ENOSPC, "No space left on device"), False, False, False),
        (CheckpointError("no", **PARTS), False, False, False),
        (LOST, True, False, False),
        (caused_by(ValueError("the exchange failed"), LOST), True, False, False),
        (torch.distributed.DistStoreError("wait timeout"), True, False, False),
        (RankFailed("no", rank=0, cause="absent", **PARTS), True, False, False),
        (MemoryError(), False, True, False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), False, True, False),
        (RuntimeError("std::bad_alloc"), False, True, False),
        (Mismatch("no", **PARTS), False, False, True),
        (RanksDiffer("no", rank=1, item="plan", **PARTS), False, False, True),
    ],
)
def test_error_kinds_are_distinguished(
    who: RankInfo, error: BaseException, of_exchange: bool, of_memory: bool, of_input: bool
) -> None:
    said = said_of(who, error)
    assert said is not None
    assert said.kind == type(error).__name__
    assert (said.of_exchange, said.of_memory, said.of_input) == (of_exchange, of_memory, of_input)


def test_memory_that_torch_cannot_allocate_is_known_as_such(who: RankInfo) -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**52)
    assert statement_of(failed.value).of_memory


def test_the_users_line_is_reported(who: RankInfo) -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.nn.Linear(2, 3)(torch.ones(4, 4))
    assert statement_of(failed.value).line.startswith("test_status_reporter.py:")
    assert "torch.nn.Linear(2, 3)" in statement_of(failed.value).line


def test_the_first_statement_is_kept(who: RankInfo) -> None:
    assert said_of(who, ValueError("first")) == said_of(who, KeyError("second"))


@pytest.mark.parametrize(("code", "is_told"), [(0, False), (None, False), (3, True), ("no", True)])
def test_a_failing_exit_is_reported(who: RankInfo, code: Any, is_told: bool) -> None:
    assert (said_of(who, SystemExit(code)) is not None) == is_told


def test_a_disk_that_is_full_does_not_hide_the_error(tmp_path: Path) -> None:
    nowhere = RankInfo(rank=1, size=2, files=RankFiles(path=tmp_path / "missing"))
    assert said_of(nowhere, ValueError("no")) is None


def test_torchrun_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ValueError, match="no such"), recorded(RankInfo(rank=1, size=2)):
        raise ValueError("no such sample")
    read = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert "no such sample" in str(read.message)
    assert abs(read.timestamp - time.time()) < 600


def test_a_rank_prints_its_stack_on_request(tmp_path: Path) -> None:
    place = RankFiles(path=tmp_path)
    answer_when_asked(place)
    with place.ask.open("wb", buffering=0) as asking:
        asking.write(b"?")
    end = time.monotonic() + 60
    while not place.answer.exists() and time.monotonic() < end:
        time.sleep(0.01)
    answer = RankProgress.of_json(read_whole(place.answer) or {})
    assert answer.line.startswith("test_status_reporter.py:")
    assert place.ask.stat().st_mode & 0o077 == 0
