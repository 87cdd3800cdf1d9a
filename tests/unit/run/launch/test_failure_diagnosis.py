"""The rank to blame, from plain evidence: artificial ranks that no process has to simulate."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import BadInput, NonFinite, RankFailed, RanksDiffer, SteelyardError
from steelyard.run.launch import monitor as watch
from steelyard.run.launch.failure_diagnosis import Evidence, FailureCase, certain_verdict, verdict
from steelyard.run.launch.rank_status import Issued, RankProgress, RankStatus
from steelyard.run.launch.run_files import read_whole, write_whole

GLOO = "[gloo/transport/tcp/pair.cc:537] Connection reset by peer"


def at(
    number: int,
    words: str = "all_reduce Float [4]",
    *,
    is_waiting: bool = True,
    before: tuple[int, ...] = (),
) -> RankProgress:
    lately = tuple(Issued(group="0", number=n, words=words) for n in (*before, number))
    return RankProgress(
        issued=lately[-1:], lately=lately, is_waiting=is_waiting, line="train.py:7: wait()"
    )


def lost(seconds: float = 1.0, progress: RankProgress | None = None) -> dict[str, Any]:
    """Return a rank that complains about another one, and still runs."""
    said = RankStatus(
        kind="RuntimeError",
        text=GLOO,
        at_seconds=seconds,
        of_exchange=True,
        progress=progress or at(5),
    )
    return {"statement": said}


def raised(seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    said = RankStatus(kind="KeyError", text="no", line="f.py:1", at_seconds=seconds, **more)
    return {"statement": said, "status": 1}


def asked(progress: RankProgress | None) -> dict[str, Any]:
    return {"was_asked": True, "answer": progress}


def ended(status: int, seconds: float = 1.0, stderr: str | None = "") -> dict[str, Any]:
    return {"status": status, "ended_seconds": seconds, "stderr": stderr}


def case(*ranks: Mapping[str, Any], oom_kills: int = 0) -> FailureCase:
    evidence = tuple(Evidence(rank=i, **facts) for i, facts in enumerate(ranks))
    return FailureCase(ranks=evidence, timeout_seconds=9, logs="logs/run", oom_kills=oom_kills)


# The failure of the culprit, the reports of the two other ranks, and the expected cause.
STORIES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "raised": (raised(), lost(2.0), "exception"),
    "raised, seen later": (raised(2.0), lost(1.0), "exception"),
    "out of memory": (raised(of_memory=True), lost(), "out of memory"),
    "killed": (ended(-signal.SIGKILL, 2.0), lost(1.0), "killed"),
    "crashed": (ended(-signal.SIGSEGV), lost(), "killed"),
    "bad_alloc": (ended(-signal.SIGABRT, stderr="what(): std::bad_alloc"), lost(), "out of memory"),
    "aborted": (ended(-signal.SIGABRT, stderr="assertion failed"), lost(), "killed"),
    "exit code": (ended(3, stderr="usage:"), lost(), "exit code"),
    "exit code, no log": (ended(3, stderr=None), lost(), "exit code"),
    "stopped": ({"is_stopped": True}, lost(), "stopped"),
    "ended early": (ended(0), lost(), "ended early"),
    "behind": (asked(at(4)), lost(), "hanging"),
    "came to no exchange at all": (asked(RankProgress(is_waiting=True)), lost(), "hanging"),
    "no answer": (asked(None), lost(), "hanging"),
    "in no exchange": (asked(at(5, is_waiting=False)), lost(), "hanging"),
    "another exchange": (lost(progress=at(5, "broadcast Float [4]")), lost(), "other exchange"),
    "another amount": (lost(progress=at(5, "all_reduce Float [5]")), lost(), "other exchange"),
    "another exchange, after which others went on": (
        lost(progress=at(5, "broadcast Float [4]")),
        lost(progress=at(7, before=(5, 6))),
        "other exchange",
    ),
    "aborted by gloo": (ended(-signal.SIGABRT, stderr=GLOO), lost(), "other exchange"),
}


@pytest.mark.parametrize("story", STORIES)
def test_the_failing_rank_is_named_whichever_it_is(story: str) -> None:
    culprit, witness, cause = STORIES[story]
    for order in sorted(set(permutations([True, False, False]))):
        found = verdict(case(*(culprit if guilty else witness for guilty in order)))
        assert isinstance(found, RankFailed)
        assert (found.rank, found.cause) == (order.index(True), cause)
        assert found.happened.startswith(f"rank {found.rank} ")
        assert "logs/run" in found.remedy
        assert str(found).count("\n") == 2


@pytest.mark.parametrize("story", STORIES)
def test_an_immediate_verdict_is_final(story: str) -> None:
    culprit, witness, cause = STORIES[story]
    early = certain_verdict(case(culprit, witness))
    waits = ("hanging", "other exchange", "ended early")
    assert (early is None) == (cause in waits)
    assert early is None or str(early) == str(verdict(case(culprit, witness)))


def test_the_first_of_two_failures_is_reported() -> None:
    for first, second in ((1.0, 2.0), (2.0, 1.0)):
        found = verdict(case(raised(first), ended(-signal.SIGSEGV, second)))
        assert isinstance(found, RankFailed)
        assert found.rank == int(second < first)


def test_out_of_memory_is_reported_only_with_evidence() -> None:
    killed = (lost(), ended(-signal.SIGKILL))
    assert "memory" not in verdict(case(*killed)).happened
    assert "probably out of memory" in verdict(case(*killed, oom_kills=1)).happened
    assert "memory" not in verdict(case(lost(), ended(-signal.SIGSEGV), oom_kills=1)).happened


def test_an_error_of_the_input_blames_no_rank() -> None:
    found = verdict(case(raised(2.0), raised(1.0, of_input=True, expected="a", remedy="b")))
    assert type(found) is BadInput
    assert (found.expected, found.remedy) == ("a", "b")
    found = verdict(case(raised(differs=(1, "plan")), raised(differs=(1, "plan"))))
    assert isinstance(found, RanksDiffer)
    assert (found.rank, found.item) == (1, "plan")


def refused(seconds: float = 1.0) -> dict[str, Any]:
    return raised(seconds, of_input=True, expected="a", remedy="b")


def test_a_request_impossible_on_one_rank_names_it() -> None:
    """The verdict waits until the others had time to report the same."""
    assert certain_verdict(case(asked(at(5)), refused())) is None
    for other in (asked(at(5)), lost()):
        for place in (0, 1):
            found = verdict(case(*(refused() if rank == place else other for rank in (0, 1))))
            assert type(found) is BadInput
            assert found.happened.startswith(f"on rank {place}: ")
    assert str(certain_verdict(case(refused(2.0), refused(1.0)))).startswith("no\n")


def test_who_exchanges_by_torch_while_another_waits_for_its_share_of_memory_is_named() -> None:
    missing = RankStatus(kind="RankFailed", text="no message came", of_exchange=True, missed=1)
    waits = {"statement": missing}
    elsewhere = lost(progress=at(5, "all_gather Byte [64]"))
    found = verdict(case(waits, elsewhere))
    assert isinstance(found, RankFailed)
    assert (found.rank, found.cause) == (1, "other exchange")
    assert "all_gather Byte [64], where rank 0 waited for its message through" in found.happened
    assert "batches of the same shapes" in found.remedy
    # A rank that is stopped or has exited is named as such; two ranks that wait for each other are
    # not.
    assert getattr(verdict(case(waits, {"is_stopped": True})), "cause", "") == "stopped"
    other = {"statement": RankStatus(kind="RankFailed", text="", of_exchange=True, missed=0)}
    assert getattr(verdict(case(waits, other)), "cause", "") == "exchange"
    assert RankStatus.of_json(json.loads(json.dumps(missing.to_json()))) == missing


def test_a_missing_rank_is_reported_absent() -> None:
    said = RankStatus(kind="RankFailed", text="", of_exchange=True, absent=1)
    missed = {"statement": said}
    for facts, cause in (
        ({}, "absent"),
        ({"is_stopped": True}, "stopped"),
        (ended(7), "exit code"),
    ):
        found = verdict(case(missed, facts))
        assert isinstance(found, RankFailed)
        assert (found.rank, found.cause) == (1, cause)


def test_lost_connections_alone_are_blamed_on_the_exchange() -> None:
    found = verdict(case(lost(2.0), lost(1.0)))
    assert isinstance(found, RankFailed)
    assert (found.cause, GLOO in found.happened) == ("exchange", True)


def test_without_the_flight_recorder_no_rank_is_blamed_for_waiting() -> None:
    nothing = RankProgress(is_waiting=True)
    found = verdict(case(lost(progress=nothing), asked(nothing), asked(nothing)))
    assert isinstance(found, RankFailed)
    assert found.cause == "exchange"


def test_a_slow_rank_is_not_blamed_for_one_ended_by_gloo() -> None:
    found = verdict(case(ended(-signal.SIGABRT, stderr=None), asked(None), lost()))
    assert isinstance(found, RankFailed)
    assert (found.rank, found.cause) == (0, "other exchange")


FACTS = st.sampled_from(
    [
        *(culprit for culprit, _, _ in STORIES.values()),
        lost(),
        ended(0),
        ended(1, stderr=GLOO),
        asked(at(5)),
    ]
)


@given(st.lists(FACTS, min_size=1, max_size=5), st.integers(0, 2))
def test_trouble_of_any_kind_has_a_verdict(facts: list[dict[str, Any]], oom_kills: int) -> None:
    if any(each.get("status") or "statement" in each or "is_stopped" in each for each in facts):
        found = verdict(case(*facts, oom_kills=oom_kills))
        assert isinstance(found, SteelyardError)
        assert not isinstance(found, RankFailed) or 0 <= found.rank < len(facts)


# --- files that ranks write -----------------------------------------------------------------------

TEXT = st.text("a\n\x1b\u202e", max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)
FIELDS = st.dictionaries(st.sampled_from(sorted(RankStatus.__slots__)), JSON)


@given(FIELDS)
def test_any_status_statement_is_read(found: dict[str, Any]) -> None:
    said = RankStatus.of_json(found)
    assert all(c.isprintable() for c in said.kind + said.text + said.line)


def test_a_status_statement_is_written_and_read(tmp_path: Path) -> None:
    said = RankStatus(
        kind="K", text="t", at_seconds=1.5, of_memory=True, differs=(1, "plan"), progress=at(3)
    )
    write_whole(tmp_path / "error.json", said.to_json())
    assert RankStatus.of_json(read_whole(tmp_path / "error.json") or {}) == said


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "\xff", "[" * 100_000, '{"a": '])
def test_a_file_that_is_not_ours_is_no_statement(tmp_path: Path, text: str) -> None:
    (tmp_path / "error.json").write_text(text, encoding="latin-1")
    assert read_whole(tmp_path / "error.json") is None
    assert read_whole(tmp_path / "missing.json") is None
    assert json.loads("{}") == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\noom 3\noom_kill 2\noom_group_kill 0\n", 2),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n", 7),
        ("oom 3\n", 0),
    ],
)
def test_out_of_memory_kills_are_counted_in_both_cgroup_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, count: int
) -> None:
    (tmp_path / "events").write_text(text)
    groups = [tmp_path / "missing", tmp_path / "events"]
    monkeypatch.setattr(watch, "_memory_groups", lambda: groups)
    assert watch.oom_kills() == count


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (lost(progress=at(5, "all_gather Long [4]")), lost()),
        (ended(-signal.SIGABRT, stderr=GLOO), lost()),
        (asked(at(5, "all_gather Long [4]", is_waiting=True)), lost()),
        (lost(progress=at(5, "all_gather Long [4]")), asked(at(5, is_waiting=True))),
    ],
    ids=["lost a collective", "aborted by gloo", "waits", "the others wait"],
)
def test_a_rank_with_a_different_batch_is_named_with_its_shape(own: Any, others: Any) -> None:
    words = "at step 5 [0] has shape [3, 8] and not [4, 8]"
    for order in sorted(set(permutations([True, False, False]))):
        odd = {**own, "pending_check": ("batch", words)}
        found = verdict(case(*(odd if mine else others for mine in order)))
        assert isinstance(found, RanksDiffer)
        assert (found.rank, found.item) == (order.index(True), "batch")
        assert words in found.happened
        assert "drop_last=True" in found.remedy


def test_a_rank_that_was_killed_is_named_and_not_who_asked_for_its_batch() -> None:
    asking = lost(2.0) | {"pending_check": ("batch", "at step 5")}
    found = verdict(case(ended(-signal.SIGKILL, 1.0), asking, asking))
    assert isinstance(found, RankFailed)
    assert found.rank == 0


def test_logs_that_do_not_stay_are_not_pointed_at() -> None:
    found = verdict(replace(case(ended(3, stderr="usage:"), lost()), logs=""))
    assert found.remedy.endswith("the output of the ranks is kept with --debug")


def not_finite(seconds: float) -> dict[str, Any]:
    said = RankStatus(
        kind="NonFinite",
        text="the loss is nan at step 4; first not finite: the local loss of rank 1, in step 4",
        at_seconds=seconds,
        expected="a finite loss",
        remedy="lower the learning rate",
        not_finite=True,
    )
    return {"statement": RankStatus.of_json(json.loads(json.dumps(said.to_json()))), "status": 4}


def test_the_first_report_of_a_non_finite_loss_is_not_blamed() -> None:
    """All ranks find it at the same time, and each names the rank whose own values were the
    cause."""
    for evidence in (case(not_finite(1.0), not_finite(2.0)), case(not_finite(1.0), {})):
        found = certain_verdict(evidence)
        assert isinstance(found, NonFinite)
        assert "of rank 1, in step 4" in found.happened
        assert "rank 0" not in str(found)
    other = certain_verdict(case(not_finite(2.0), raised(1.0)))
    assert isinstance(other, RankFailed)
    assert other.rank == 1
