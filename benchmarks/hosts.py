"""Makes hosts on one machine, joined by links of a given rate, for ranks that share no loopback.

    python benchmarks/hosts.py

Each host is a network namespace. Two are joined by a veth pair, more by a bridge, and tc's tbf
limits what each sends. A namespace has no name and is held by a process that the kernel kills
together with this one, so nothing is left behind. Two hosts may also be joined by a relay that
delays every packet, because the kernel's netem is not available everywhere. Run as a script, this
checks that links carry the rate they are limited to. Needs Linux. Not for what ranks do on the
hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

DEVICE = "link0"
FEWEST, MOST = 2, 6
# A kernel of 250 Hz refills a bucket every 4 ms: one of 64 kB carries 43 % of 1 Gbit/s.
_BURST_BYTES = 256 << 10
# After an idle time, a full bucket would let its burst through at once, which a wire does not. A
# second bucket of a few packets limits the peak rate.
_PEAK_SHARE, _PEAK_SECONDS, _PEAK_BYTES = 1.02, 2.5e-4, 9000
# tbf cuts up packets that are larger than that, and every piece of 1,500 bytes waits for its own
# timer: at 1 Gbit/s this takes three quarters of a core, while a wire takes none. So the packets
# are made smaller, with room for the headers.
_PACKET_SHARE, _PACKET_BYTES = 0.92, 65536
_QUEUE_MS = 200
# A relay handles one packet at a time, so packets are fewer and larger.
_RELAYED_BYTES = 60_000
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_TOOLS = ("ip", "tc", "setpriv", "unshare", "nsenter")
# Messages of tools and kernels for a missing permission or feature, and not for a wrong command.
_REFUSALS = (
    "operation not permitted", "permission denied", "not supported", "unknown device type",
    "qdisc kind is unknown", "/dev/net/tun",
)  # fmt: skip


class NoHosts(SystemExit):
    """Raised where this machine does not allow hosts to be made."""


@dataclass(slots=True, kw_only=True)
class Hosts:
    """Hosts on this machine.

    The process of each host in ``holders`` keeps its namespace alive. A bridge, which more than two
    hosts have, has a namespace of its own.
    """

    holders: list[subprocess.Popen[str]]
    bridge: subprocess.Popen[str] | None
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, host: int, command: Sequence[str], environ: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host; it is killed when this process or the hosts end."""
        inside = [*_DIES_WITH_US, *_within(self.holders[host]), *command]
        process = subprocess.Popen(inside, env={**environ, "GLOO_SOCKET_IFNAME": DEVICE})
        self.started.append(process)
        return process

    def shape(self, bits_per_second: int | None, *, host: int | None = None) -> None:
        """Limit the rate of all links, or of the link of one host; None removes the limit."""
        shaped = range(len(self.holders)) if host is None else [host]
        ends = [(self.holders[n], DEVICE) for n in shaped]
        if self.bridge is not None:
            ends += [(self.bridge, _port(n)) for n in shaped]
        for holder, device in ends:
            found = _run([*_within(holder), "tc", "qdisc", "show", "dev", device])
            if "tbf" in found:
                _run([*_within(holder), "tc", "qdisc", "del", "dev", device, "root"])
            packet = _PACKET_BYTES
            if bits_per_second is not None:
                rate = ["rate", f"{bits_per_second}bit", "burst", str(_BURST_BYTES)]
                peak = ["peakrate", f"{round(_PEAK_SHARE * bits_per_second)}bit"]
                at_once = max(_PEAK_BYTES, round(_PEAK_SECONDS * bits_per_second / 8))
                packet = round(_PACKET_SHARE * at_once)
                rest = [*peak, "mtu", str(at_once), "latency", f"{_QUEUE_MS}ms"]
                tbf = ["tc", "qdisc", "add", "dev", device, "root", "tbf", *rate, *rest]
                _run([*_within(holder), *tbf])
            largest = ["ip", "link", "set", device, "gso_max_size", str(packet)]
            _run([*_within(holder), *largest])

    @contextlib.contextmanager
    def cut_off(self, host: int) -> Iterator[None]:
        """Take down the link of a host within the context."""
        device = [*_within(self.holders[host]), "ip", "link", "set", DEVICE]
        _run([*device, "down"])
        try:
            yield
        finally:
            _run([*device, "up"])

    def sent_bytes(self, host: int) -> int:
        """Return the kernel's count of bytes that a host has sent, headers included."""
        lines = Path(f"/proc/{self.holders[host].pid}/net/dev").read_text().splitlines()
        counts = next(line for line in lines if line.strip().startswith(f"{DEVICE}:"))
        return int(counts.partition(":")[2].split()[8])


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


@contextlib.contextmanager
def hosts(
    count: int, *, bits_per_second: int | None = None, delay_seconds: float = 0.0
) -> Iterator[Hosts]:
    """Yield ``count`` hosts, each joined to all others.

    Between two hosts, every packet may be delayed by ``delay_seconds``. Raises NoHosts, with the
    reason, where the machine does not allow hosts.
    """
    assert FEWEST <= count <= MOST, f"from {FEWEST} to {MOST} hosts, not {count}"
    assert count == FEWEST or not delay_seconds, "a relay joins two hosts"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise NoHosts(f"no hosts can be made here: {', '.join(missing)} not found")
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(_namespace()) for _ in range(count)]
        bridge = stack.enter_context(_namespace()) if count > FEWEST else None
        made = Hosts(holders=holders, bridge=bridge)
        stack.callback(_end, made.started)
        if delay_seconds:
            stack.enter_context(_relay(holders, delay_seconds))
        _join(made, is_relayed=delay_seconds > 0)
        made.shape(bits_per_second)
        yield made


def _namespace() -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Start a process in a network namespace of its own, with the loopback up."""
    inside = ["sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]
    return _held(["unshare", "--net", *inside], "no hosts can be made here")


@contextlib.contextmanager
def _relay(holders: Sequence[subprocess.Popen[str]], delay_seconds: float) -> Iterator[None]:
    """Run a relay between two hosts; it makes a device in each, the ends of their link."""
    script = str(Path(__file__).with_name("_relay.py"))
    ends = [str(holder.pid) for holder in holders]
    command = [sys.executable, script, *ends, DEVICE, str(delay_seconds)]
    with _held(command, "no link with a delay can be made here"):
        for holder in holders:
            _run([*_within(holder), "ip", "link", "set", DEVICE, "mtu", str(_RELAYED_BYTES)])
        yield


@contextlib.contextmanager
def _held(command: Sequence[str], failed: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process and wait until it prints "up"; it is killed when the context ends.

    It is killed with this process, too.
    """
    with subprocess.Popen(
        [*_DIES_WITH_US, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as held:
        try:
            assert held.stdout is not None
            assert held.stderr is not None
            if held.stdout.readline() != "up\n":
                said = held.stderr.read().strip().splitlines() or ["no message"]
                raise _failed(command, said[-1], failed)
            yield held
        finally:
            held.kill()


def _join(made: Hosts, *, is_relayed: bool) -> None:
    """Make the devices of the links and bring them up, none of them in our own namespace."""
    if is_relayed:
        pass  # the relay has made them
    elif made.bridge is None:
        near, far = made.holders
        _veth(near, DEVICE, far, DEVICE)
    else:
        _run([*_within(made.bridge), "ip", "link", "add", "bridge0", "type", "bridge"])
        _run([*_within(made.bridge), "ip", "link", "set", "bridge0", "up"])
    for host, holder in enumerate(made.holders):
        if made.bridge is not None:
            port = _port(host)
            _veth(holder, DEVICE, made.bridge, port)
            _run([*_within(made.bridge), "ip", "link", "set", port, "master", "bridge0", "up"])
        _run([*_within(holder), "ip", "address", "add", f"{address(host)}/24", "dev", DEVICE])
    for holder in made.holders:
        _run([*_within(holder), "ip", "link", "set", DEVICE, "up"])


def _veth(
    near: subprocess.Popen[str], device: str, far: subprocess.Popen[str], its_device: str
) -> None:
    here, there = ["netns", str(near.pid), "type", "veth"], ["netns", str(far.pid)]
    _run(["ip", "link", "add", device, *here, "peer", "name", its_device, *there])


def _port(host: int) -> str:
    return f"port{host}"


def _within(holder: subprocess.Popen[str]) -> list[str]:
    return ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise _failed(command, said, "no hosts can be made here")
    return done.stdout


def _failed(command: Sequence[str], said: str, refused: str) -> BaseException:
    """Return NoHosts if the machine refused the command, else a RuntimeError.

    Any other failure is an error of this module, and no reason to skip a test.
    """
    if any(refusal in said.lower() for refusal in _REFUSALS):
        return NoHosts(f"{refused}: {said}")
    return RuntimeError(f"{' '.join(command)}: {said}")


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in started:
        process.kill()
        process.wait()


# --- do links carry the rate they are limited to? -------------------------------------------------

_RATES = (1_000_000_000, 100_000_000)
_SECONDS, _TRIES = 1.0, 3
_LEAST_SHARE, _MOST_SHARE = 0.85, 1.05
_OVERHEAD = 1.10
_PORT = 7700
_RECEIVE = f"""
import socket, sys, time
server = socket.create_server(("0.0.0.0", {_PORT}))
for _ in range(int(sys.argv[2])):
    peer, _ = server.accept()
    count, begin = 0, None
    while piece := peer.recv(1 << 20):
        begin = begin or time.perf_counter()
        count += len(piece)
    with open(sys.argv[1], "a") as file:
        print(count, time.perf_counter() - begin, file=file)
"""
_SEND = f"""
import socket, sys, time
for _ in range(100):
    try:
        peer = socket.create_connection((sys.argv[1], {_PORT}))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
peer.sendall(bytes(int(sys.argv[2])))
"""


def main() -> None:
    figures = [_carried(count, rate) for count in (FEWEST, FEWEST + 1) for rate in _RATES]
    worst = min(figures, key=lambda f: f["value"])
    print(
        json.dumps(
            {
                "name": "hosts: what a shaped link carries / what it is shaped to",
                "value": worst["value"],
                "interval": None,
                "target": _LEAST_SHARE,
                "ok": all(f["ok"] for f in figures),
                "figures": figures,
            }
        )
    )


def _carried(count: int, rate: int) -> dict[str, object]:
    """Measure the rate of TCP from the last host to the first, relative to the limit.

    ``counted`` is the kernel's count of bytes relative to the bytes that were sent.
    """
    nbytes = round(rate / 8 * _SECONDS)
    with tempfile.TemporaryDirectory() as folder, hosts(count, bits_per_second=rate) as made:
        said = Path(folder) / "received"
        receive = [sys.executable, "-c", _RECEIVE, str(said), str(_TRIES)]
        receiver = made.start(0, receive, os.environ)
        before = made.sent_bytes(count - 1)
        for _ in range(_TRIES):
            send = [sys.executable, "-c", _SEND, address(0), str(nbytes)]
            made.start(count - 1, send, os.environ).wait()
            time.sleep(0.1)
        receiver.wait()
        sent = made.sent_bytes(count - 1) - before
        tries = [line.split() for line in said.read_text().splitlines()]
    rates = [8 * int(n) / float(seconds) for n, seconds in tries]
    share, counted = median(rates) / rate, sent / (_TRIES * nbytes)
    return {
        "name": f"{count} hosts, {rate / 1e6:g} Mbit/s",
        "value": round(share, 3),
        "counted": round(counted, 4),
        "ok": _LEAST_SHARE <= share <= _MOST_SHARE and 1.0 <= counted <= _OVERHEAD,
    }


if __name__ == "__main__":
    main()
