"""Hosts on one machine: each reaches all others, sent bytes are counted, and nothing is left
behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.hosts import FEWEST, MOST, Hosts, NoHosts, address, hosts

pytestmark = [pytest.mark.dist, pytest.mark.slow]

_ROOT = Path(__file__).parents[3]
_NBYTES = 5_000_000
_CONNECT = """
import socket, sys, time
for _ in range(200):
    try:
        peer = socket.create_connection((sys.argv[1], 7700))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
"""
_SEND = f"""{_CONNECT}
peer.sendall(bytes({_NBYTES}))
"""
_RECEIVE = """
import socket
peer, _ = socket.create_server(("0.0.0.0", 7700)).accept()
while peer.recv(1 << 20):
    pass
"""
_LEFT = """
import os, signal, sys
from benchmarks.hosts import hosts
with hosts(3) as made:
    made.start(1, ["sleep", "600"], os.environ)
    print(*(p.pid for p in (*made.holders, made.bridge, *made.started)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _may() -> None:
    try:
        with hosts(FEWEST):
            pass
    except NoHosts as reason:
        pytest.skip(str(reason))


def _sent(made: Hosts, source: int, target: int) -> float:
    """Return the seconds in which these bytes were sent from one host to another."""
    receiver = made.start(target, [sys.executable, "-c", _RECEIVE], os.environ)
    begin = time.perf_counter()
    sender = made.start(source, [sys.executable, "-c", _SEND, address(target)], os.environ)
    assert sender.wait() == receiver.wait() == 0
    return time.perf_counter() - begin


@pytest.mark.parametrize("count", [FEWEST, MOST])
def test_sent_bytes_are_counted_on_the_sending_host_only(count: int) -> None:
    with hosts(count) as made:
        before = [made.sent_bytes(host) for host in range(count)]
        _sent(made, count - 1, 0)
        sent = [made.sent_bytes(host) - before[host] for host in range(count)]
    assert _NBYTES <= sent[-1] <= 1.1 * _NBYTES
    # The receiver only sends acknowledgements; the other hosts at most resolve addresses.
    assert sent[0] < 0.1 * _NBYTES
    assert all(nbytes < 1000 for nbytes in sent[1:-1])


def test_a_shaped_link_keeps_its_rate_until_it_is_released() -> None:
    """Check that a link is not faster than its rate.

    Its real speed depends on the load of the machine.
    """
    with hosts(FEWEST, bits_per_second=20_000_000) as made:
        # Apart from the burst, 5 MB take 2 s.
        assert _sent(made, 0, 1) > 1.8
        made.shape(None)
        made.shape(40_000_000)
        assert _sent(made, 1, 0) > 0.9


_SUM = """
import sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
total = torch.zeros(1 << 18)
for step in range(40):
    x = torch.full((1 << 18,), float(rank + step))
    dist.all_reduce(x)
    total += x
    (folder / f"{rank}").write_text(str(step))
assert total.eq(sum(2 * step + 1 for step in range(40))).all()
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_go_on_when_a_link_that_was_down_is_up_again(tmp_path: Path) -> None:
    """Sums are the same; what was in flight when the link went down is sent again."""
    with hosts(FEWEST, bits_per_second=100_000_000) as made:
        ranks = [
            made.start(rank, [sys.executable, "-c", _SUM, str(tmp_path), str(rank)], os.environ)
            for rank in (0, 1)
        ]
        steps = tmp_path / "1"
        _await(lambda: steps.exists() and int(steps.read_text() or 0) > 2)
        with made.cut_off(1):
            time.sleep(0.5)
            stands_at = steps.read_text()
            time.sleep(1.0)
            assert steps.read_text() == stands_at, "sums without a link"
        assert [rank.wait() for rank in ranks] == [0, 0]
        assert stands_at != "39"


def _await(has_come: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not has_come():
        assert time.monotonic() < until
        time.sleep(0.01)


_ROUND_TRIPS = 5
_ANSWER = f"""
import socket
peer, _ = socket.create_server(("0.0.0.0", 7700)).accept()
for _ in range({_ROUND_TRIPS}):
    peer.sendall(peer.recv(1))
"""
_ASK = f"""{_CONNECT}
begin = time.perf_counter()
for _ in range({_ROUND_TRIPS}):
    peer.sendall(b".")
    assert peer.recv(1) == b"."
print(time.perf_counter() - begin, file=open(sys.argv[2], "w"))
"""


def test_messages_over_a_slow_link_take_its_latency(tmp_path: Path) -> None:
    """Messages do not arrive sooner than the latency, are complete, and are counted.

    The load of the machine cannot change this.
    """
    delay = 0.02
    try:
        with hosts(FEWEST, delay_seconds=delay) as made:
            answering = made.start(0, [sys.executable, "-c", _ANSWER], os.environ)
            said = tmp_path / "seconds"
            asking = made.start(
                1, [sys.executable, "-c", _ASK, address(0), str(said)], os.environ
            )
            assert asking.wait() == answering.wait() == 0
            before = made.sent_bytes(1)
            _sent(made, 1, 0)
            assert _NBYTES <= made.sent_bytes(1) - before <= 1.1 * _NBYTES
    except NoHosts as reason:
        if "/dev/net/tun" in str(reason):
            pytest.skip(str(reason))
        raise
    assert float(said.read_text()) >= _ROUND_TRIPS * 2 * delay


def test_a_wrong_request_fails_and_does_not_skip_the_test() -> None:
    with hosts(FEWEST) as made, pytest.raises(RuntimeError, match="tbf"):
        made.shape(-1)


def test_emulated_hosts_are_removed_when_their_process_is_killed() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(_ROOT / "src"), str(_ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", _LEFT], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    pids = done.stdout.split()
    assert len(pids) == 5, done.stderr
    until = time.monotonic() + 30
    while any(map(_is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(_is_alive, pids))


def _is_alive(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
