"""The waits of a rank: for data, and then for the tensors that a backend still holds; and hints
to the kernel about gloo's threads and connections."""

from __future__ import annotations

import socket
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from steelyard.comm import channel
from steelyard.comm.channel import Waiting
from steelyard.comm.gloo import thread_scheduling as turns
from steelyard.comm.tcp_counters import SentBytesCounter
from steelyard.comm.tcp_quickack import QuickAcks


def test_late_messages_are_released_before_the_step_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo's thread signals completion, and holds the tensor for a moment longer: equally long
    on slow and fast links."""
    monkeypatch.setattr(channel, "_PATIENCE_SECONDS", 1.0)
    waiting, sent = Waiting(), torch.ones(4)
    gloos: list[torch.Tensor] = []

    def arriving(x: torch.Tensor) -> torch.Tensor:
        # As in gloo, the backward pass keeps a reference that Python does not see.
        gloos.append(x * torch.ones(4, requires_grad=True))
        time.sleep(1.1)
        threading.Timer(0.01, gloos.clear).start()
        return x

    monkeypatch.setattr(waiting, "_wait", arriving)
    arrived = waiting(sent)
    assert arrived is sent
    assert arrived._use_count() == 1  # type: ignore[attr-defined]


def test_threads_that_listen_for_gloo_take_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[tuple[int, int]] = []
    for number, name in ((11, "python"), (12, turns.LISTENER), (13, turns.LISTENER)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "comm").write_text(f"{name}\n")
    monkeypatch.setattr(turns, "_TASKS", tmp_path)

    def tell(task: int, policy: int, _: object) -> None:
        told.append((task, policy))
        if task == 12:
            raise ProcessLookupError  # the thread has ended

    monkeypatch.setattr(turns.os, "sched_setscheduler", tell)
    turns.take_turns()
    assert sorted(told) == [(12, turns.os.SCHED_BATCH), (13, turns.os.SCHED_BATCH)]


def test_a_rank_yields_less_often_the_longer_others_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If another program uses the core, a yield takes a time slice: the program gets a fifth of
    the core, not all of it."""
    now, taken = [0.0], [0.0]

    def others(seconds: float) -> None:
        taken[0] += seconds
        now[0] += seconds

    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    for theirs, share in ((0.0, 0.0), (2e-5, 0.2), (4e-3, 0.2), (1.0, 0.21)):
        now[0] = taken[0] = 0.0
        calls: list[float] = []

        def give(theirs: float = theirs, calls: list[float] = calls) -> None:
            calls.append(now[0])
            others(theirs)

        monkeypatch.setattr(turns, "give_way", give)
        give_way = turns.ThreadScheduling()
        while now[0] < 30:
            now[0] += 1e-5  # the time of a short operator
            give_way()
        assert taken[0] <= share * now[0]
        assert len(calls) >= 6
        assert all(after - before > 0.99e-4 for before, after in pairwise(calls))


def test_sent_bytes_are_counted_once_without_closing_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
        wire = SentBytesCounter()
        assert wire.sent_bytes == 0
        wire.look()
        before = wire.sent_bytes
        ours.sendall(bytes(5000))
        theirs.sendall(bytes(700))
        assert len(theirs.recv(5000, socket.MSG_WAITALL)) == 5000
        assert len(ours.recv(700, socket.MSG_WAITALL)) == 700
        assert wire.sent_bytes - before == 5700
        theirs.close()
        wire.look()
        assert 5000 <= wire.sent_bytes - before <= 5700
        del wire
        assert ours.getpeername()
        ours.close()


def test_counters_are_read_of_connections_only_without_closing_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as unused:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
        local, other = socket.socketpair()
        told = QuickAcks()
        asked = {connection.fileno() for connection in told._connections}
        assert {ours.fileno(), theirs.fileno()} <= asked
        rest = {s.fileno() for s in (listening, unused, local, other)}
        assert asked.isdisjoint(rest)
        theirs.close()
        told.at_once()  # one of the two is gone
        del told
        assert ours.getpeername()
        for one in (ours, local, other):
            one.close()
