"""A proxy process for one rank, called its carrier. It transfers the rank's slots to and from other
hosts with NIXL.

It is a separate program because NIXL and OR-tools ship different versions of one library, and one
process cannot load both. It knows nothing of tensors: when the rank has written a slot and sent a
notification, the proxy writes the same slot on the other host and has the proxy there notify its
rank. Returned slots go the other way. It ends when its rank or any connected proxy ends. Not for
deciding which messages are sent, and when: see remote_host.py.
"""

import base64
import contextlib
import ctypes
import hmac
import json
import mmap
import os
import secrets
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# The same records as in same_host.py and slots.py, which cannot be imported here because they need
# torch.
_BELL, _CREDIT = struct.Struct("<QIQQI"), struct.Struct("<II")
# Each wheel contains all of NIXL for its CUDA version, and also works without CUDA.
WHEELS = ("nixl_cu13", "nixl_cu12")
_RANK = struct.Struct("<I")
_CONNECTING_SECONDS, _ANSWER_SECONDS = 30.0, 5.0
_CHALLENGE_BYTES, _DIGEST_BYTES = 32, 32
# How long completed transfers are polled without a pause, the pause between later polls, and the
# interval at which transfers from other ranks are progressed: NIXL may not use the device.
_SPIN_SECONDS, _PAUSE_SECONDS, _PROGRESS_MS = 2e-3, 5e-5, 1
_READ_BYTES = 4096


class NixlProxy:
    """The proxy of one rank. ``setup`` has the rank, its edges, and the file descriptors that
    both processes share."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup, self._rank = setup, int(setup["rank"])
        self._edges = {int(index): edge for index, edge in setup["edges"].items()}
        api = import_module(f"{next(w for w in WHEELS if find_spec(w) is not None)}._api")
        # A progress thread would occupy a core of its own.
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = api.nixl_agent(f"steelyard {os.urandom(8).hex()}", config)
        self._memory = {index: _mapped(edge) for index, edge in self._edges.items()}
        regions = [
            (_address(memory), self._edges[index]["nbytes"], 0, "")
            for index, memory in self._memory.items()
        ]
        if regions:  # a rank without messages also has a proxy
            self._agent.register_memory(regions, "DRAM")
        self._listening = socket.create_server((setup["address"], 0), backlog=1024)
        # Other ranks receive it over the process group; a peer that does not know it is not one of
        # their proxies.
        self._cookie = secrets.token_hex(_CHALLENGE_BYTES)
        self._writes: dict[int, list[Any]] = {}
        self._in_flight: dict[int, deque[tuple[Any, bytes]]] = {}
        self._sockets: dict[int, socket.socket] = {}

    @property
    def offered(self) -> dict[str, Any]:
        """The connection data for the proxies of other ranks."""
        address, port = self._listening.getsockname()[:2]
        return {
            "address": address,
            "port": port,
            "cookie": self._cookie,
            "agent": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "memory": {index: _address(memory) for index, memory in self._memory.items()},
        }

    # --- meeting

    def meet(self, others: Mapping[str, Mapping[str, Any]]) -> None:
        """Connect to all other proxies, which do the same at the same time. Before success is
        reported, one transfer to each target is tried.
        """
        names = {}
        for rank, other in others.items():
            name = self._agent.add_remote_agent(base64.b64decode(other["agent"]))
            names[int(rank)] = name.decode() if isinstance(name, bytes) else name
        for index, edge in self._edges.items():
            target = edge["target"]
            if edge["source"] == self._rank:
                address = others[str(target)]["memory"][str(index)]
                self._writes[index] = self._prepare_writes(index, edge, address, names[target])
                self._in_flight.setdefault(target, deque())
        probes = {self._edges[i]["target"]: w[0] for i, w in self._writes.items()}
        states = {target: self._agent.transfer(write) for target, write in probes.items()}
        self._connect(others)
        deadline = time.monotonic() + _CONNECTING_SECONDS
        # Without a device, a proxy that is done must still progress the transfers of the others.
        has_reported, not_reported = False, {*self._sockets.values()}
        while not_reported or not has_reported:
            self._agent.get_new_notifs()
            for target, write in probes.items():
                if states[target] == "PROC":
                    states[target] = self._agent.check_xfer_state(write)
            if "ERR" in states.values() or time.monotonic() > deadline:
                raise OSError(0, "another host cannot be reached")
            if not has_reported and "PROC" not in states.values():
                has_reported = True
                for peer in self._sockets.values():
                    peer.sendall(b"t")
            readable, _, _ = select.select(list(not_reported), [], [], 0)
            for peer in readable:
                if peer.recv(1) != b"t":
                    raise OSError(0, "the proxy of another host has exited")
                not_reported.discard(peer)

    def _prepare_writes(
        self, index: int, edge: Mapping[str, Any], address: int, name: str
    ) -> list[Any]:
        """Return the prepared NIXL transfer of each slot of an edge."""
        slots, size = range(edge["count"]), edge["slot_bytes"]
        local, remote = (
            self._agent.prep_xfer_dlist(
                agent, [(begin + slot * size, edge["used_bytes"], 0) for slot in slots], "DRAM"
            )
            for agent, begin in (
                ("NIXL_INIT_AGENT", _address(self._memory[index])),
                (name, address),
            )
        )
        return [
            self._agent.make_prepped_xfer("WRITE", local, [slot], remote, [slot]) for slot in slots
        ]

    def _connect(self, others: Mapping[str, Mapping[str, Any]]) -> None:
        """Open one connection to each other proxy, used for all edges between the two. The rank
        with the lower number connects to the one with the higher number.
        """
        for rank in sorted(map(int, others)):
            if rank > self._rank:
                other = others[str(rank)]
                self._sockets[rank] = self._connect_to(rank, other)
        deadline = time.monotonic() + _CONNECTING_SECONDS
        while len(self._sockets) < len(others):
            self._listening.settimeout(max(0.0, deadline - time.monotonic()))
            incoming, _ = self._listening.accept()
            incoming.settimeout(_ANSWER_SECONDS)
            # Drop a connection that does not come from a proxy; the expected one will still come.
            try:
                rank = self._accept(incoming, others)
            except OSError:
                incoming.close()
                continue
            incoming.settimeout(_CONNECTING_SECONDS)
            self._sockets[rank] = incoming
        self._listening.close()
        for connection in self._sockets.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _connect_to(self, rank: int, other: Mapping[str, Any]) -> socket.socket:
        """Connect to the proxy of ``rank``; raise OSError unless both sides prove that they know
        each other's cookie.
        """
        outgoing = socket.create_connection((other["address"], other["port"]), _CONNECTING_SECONDS)
        try:
            key = self._key(self._rank, other["cookie"], rank)
            challenge, peer_challenge = (
                secrets.token_bytes(_CHALLENGE_BYTES),
                _receive_exactly(outgoing, _CHALLENGE_BYTES),
            )
            outgoing.sendall(
                _RANK.pack(self._rank)
                + challenge
                + _digest(key, b"came", peer_challenge, challenge)
            )
            answer = _receive_exactly(outgoing, _DIGEST_BYTES)
            if not hmac.compare_digest(answer, _digest(key, b"met", challenge, peer_challenge)):
                raise OSError(0, f"the process that answered for rank {rank} failed authentication")
        except BaseException:
            outgoing.close()
            raise
        return outgoing

    def _accept(self, incoming: socket.socket, others: Mapping[str, Mapping[str, Any]]) -> int:
        """Return the rank of the proxy that has connected; raise OSError if the peer does not prove
        that it is a proxy.
        """
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        incoming.sendall(challenge)
        (rank,) = _RANK.unpack(_receive_exactly(incoming, _RANK.size))
        peer_challenge, proof = (
            _receive_exactly(incoming, _CHALLENGE_BYTES),
            _receive_exactly(incoming, _DIGEST_BYTES),
        )
        if str(rank) not in others or rank >= self._rank or rank in self._sockets:
            raise OSError(0, "a connection from an unexpected rank")
        key = self._key(rank, others[str(rank)]["cookie"], self._rank)
        if not hmac.compare_digest(proof, _digest(key, b"came", challenge, peer_challenge)):
            raise OSError(0, "a connection that failed authentication")
        incoming.sendall(_digest(key, b"met", peer_challenge, challenge))
        return int(rank)

    def _key(self, lower: int, other: str, higher: int) -> bytes:
        """Return the key of a pair of proxies, derived from their cookies and from the run's token,
        if there is one.
        """
        pair = sorted((self._cookie, other))
        token = os.environ.get("STEELYARD_TOKEN", "").encode(errors="surrogateescape")
        return _digest(token, f"{lower} {higher} {pair[0]} {pair[1]}".encode(), b"", b"")

    # --- carrying

    def carry(self) -> None:
        """Transfer messages until the rank or another proxy ends."""
        poller, handlers = select.poll(), self._handlers()
        for number in handlers:
            poller.register(number, select.POLLIN)
        while True:
            for number, _ in self._poll(poller):
                if not handlers[number]():
                    return

    def _handlers(self) -> dict[int, Callable[[], bool]]:
        """Return the handler of each file descriptor; a handler returns False once the other end
        is closed."""
        handlers: dict[int, Callable[[], bool]] = {}
        for rank, number in _descriptors(self._setup["bells"]):
            handlers[number] = _Words(number, _BELL.size, self._write_handler(rank)).read
        for rank, number in _descriptors(self._setup["given_back"]):
            handlers[number] = _Words(number, _CREDIT.size, self._forward_handler(rank, b"c")).read
        for rank, connection in self._sockets.items():
            handlers[connection.fileno()] = _Words(
                connection.fileno(), 1 + _BELL.size, self._record_handler(rank)
            ).read
        return handlers

    def _write_handler(self, target: int) -> Callable[[bytes], None]:
        def send(bell: bytes) -> None:
            _, index, _, _, slot = _BELL.unpack(bell)
            write = self._writes[index][slot]
            self._agent.transfer(write)
            self._in_flight[target].append((write, bell))

        return send

    def _forward_handler(self, rank: int, kind: bytes) -> Callable[[bytes], None]:
        connection = self._sockets[rank]

        def forward(record: bytes) -> None:
            connection.sendall((kind + record).ljust(1 + _BELL.size, b"\0"))

        return forward

    def _record_handler(self, rank: int) -> Callable[[bytes], None]:
        """Return the handler for records from another proxy: notifications and returned slots for
        the rank here.
        """
        rings = dict(_descriptors(self._setup["rings"])).get(rank)
        frees = dict(_descriptors(self._setup["frees"])).get(rank)

        def handle(record: bytes) -> None:
            if record[:1] == b"b":
                assert rings is not None
                os.write(rings, record[1:])
            else:
                assert frees is not None
                os.write(frees, record[1 : 1 + _CREDIT.size])

        return handle

    def _poll(self, poller: select.poll) -> Sequence[tuple[int, int]]:
        begin = time.monotonic()
        while True:
            self._agent.get_new_notifs()
            self._notify_completed()
            if not any(self._in_flight.values()):
                return poller.poll(_PROGRESS_MS)
            if readable := poller.poll(0):
                return readable
            if time.monotonic() - begin > _SPIN_SECONDS:
                time.sleep(_PAUSE_SECONDS)

    def _notify_completed(self) -> None:
        """Send the notifications of completed transfers, in order."""
        for target, writes in self._in_flight.items():
            while writes:
                state = self._agent.check_xfer_state(writes[0][0])
                if state == "PROC":
                    break
                if state == "ERR":
                    raise OSError(0, f"writing to rank {target} failed")
                self._forward_handler(target, b"b")(writes.popleft()[1])


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise OSError(0, "the proxy of another rank has exited")
    return data


def _digest(key: bytes, side: bytes, challenge: bytes, own_challenge: bytes) -> bytes:
    return hmac.digest(key, side + b"|" + challenge + own_challenge, "sha256")


class _Words:
    """Reads fixed-size records from a file descriptor."""

    def __init__(self, number: int, size: int, take: Callable[[bytes], None]) -> None:
        self._number, self._size, self._take = number, size, take
        self._rest = b""

    def read(self) -> bool:
        data = os.read(self._number, _READ_BYTES)
        if not data:
            return False
        buffered = self._rest + data
        end = len(buffered) - len(buffered) % self._size
        for begin in range(0, end, self._size):
            self._take(buffered[begin : begin + self._size])
        self._rest = buffered[end:]
        return True


def _descriptors(files: Mapping[str, int]) -> list[tuple[int, int]]:
    return [(int(rank), number) for rank, number in files.items()]


def _mapped(edge: Mapping[str, Any]) -> mmap.mmap:
    return mmap.mmap(edge["file"], edge["nbytes"])


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def main() -> None:
    # Signals that stop a rank reach its whole process group; the proxy ends after its rank instead.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the output of libraries out of the answers

    def reply(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    try:
        carrier = NixlProxy(json.loads(sys.stdin.readline()))
        reply(carrier.offered)
        carrier.meet(json.loads(sys.stdin.readline()))
    except Exception as error:  # noqa: BLE001 - NIXL's share no base; the rank reports it
        reply({"failed": f"{type(error).__name__}: {error}"})
        return
    reply({})
    with contextlib.suppress(BrokenPipeError, ConnectionError):  # the rank notices it
        carrier.carry()


if __name__ == "__main__":
    main()
