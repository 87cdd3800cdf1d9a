"""A process beside a rank that carries its slots over to other hosts, and theirs to it, by NIXL.

A program of its own, since NIXL and OR-tools bring one library each in another version, and one
process cannot hold both. It knows no tensors: what a rank has written into a slot, and rung for,
it writes into the same slot on the other host, and has the carrier there ring. What is given back
goes the other way. It ends with its rank, and with any carrier that it speaks to. Not for what is
sent, nor when: see remote_host.py.
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

# As same_host.py and slots.py have them, which bring torch along.
_BELL, _CREDIT = struct.Struct("<QIQQI"), struct.Struct("<II")
# Each wheel has the whole of NIXL, for its version of CUDA or for none.
WHEELS = ("nixl_cu13", "nixl_cu12")
_RANK = struct.Struct("<I")
_CONNECTING_SECONDS, _ANSWER_SECONDS = 30.0, 5.0
_CHALLENGE_BYTES, _DIGEST_BYTES = 32, 32
# How often one looks after what a device does, at first and later; and how often a hand is lent to
# what others write here: a device may be there and not be used.
_SPIN_SECONDS, _NAP_SECONDS, _HELP_MS = 2e-3, 5e-5, 1
_MANY = 4096


class NixlProxy:
    """``setup`` names the rank, its edges, and the numbers of the files that both hold."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup, self._rank = setup, int(setup["rank"])
        self._edges = {int(index): edge for index, edge in setup["edges"].items()}
        api = import_module(f"{next(w for w in WHEELS if find_spec(w) is not None)}._api")
        # Its own thread would take a core for itself.
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = api.nixl_agent(f"steelyard {os.urandom(8).hex()}", config)
        self._memory = {index: _mapped(edge) for index, edge in self._edges.items()}
        regions = [
            (_address(memory), self._edges[index]["nbytes"], 0, "")
            for index, memory in self._memory.items()
        ]
        if regions:  # a rank that neither sends nor reads anything has a carrier too
            self._agent.register_memory(regions, "DRAM")
        self._listening = socket.create_server((setup["address"], 0), backlog=1024)
        # Told to other ranks over the process group; who does not know it is no carrier of theirs.
        self._cookie = secrets.token_hex(_CHALLENGE_BYTES)
        self._writes: dict[int, list[Any]] = {}
        self._under_way: dict[int, deque[tuple[Any, bytes]]] = {}
        self._sockets: dict[int, socket.socket] = {}

    @property
    def offered(self) -> dict[str, Any]:
        """For the carriers of others."""
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
        """All do so together; a way to each is tried before anything is said to be there."""
        names = {}
        for rank, other in others.items():
            name = self._agent.add_remote_agent(base64.b64decode(other["agent"]))
            names[int(rank)] = name.decode() if isinstance(name, bytes) else name
        for index, edge in self._edges.items():
            target = edge["target"]
            if edge["source"] == self._rank:
                there = others[str(target)]["memory"][str(index)]
                self._writes[index] = self._prepared(index, edge, there, names[target])
                self._under_way.setdefault(target, deque())
        tried = {self._edges[i]["target"]: w[0] for i, w in self._writes.items()}
        states = {target: self._agent.transfer(write) for target, write in tried.items()}
        self._connect(others)
        until = time.monotonic() + _CONNECTING_SECONDS
        # Who has tried all its own is needed by those that have not, where no device does it.
        is_told, waited_for = False, {*self._sockets.values()}
        while waited_for or not is_told:
            self._agent.get_new_notifs()
            for target, write in tried.items():
                if states[target] == "PROC":
                    states[target] = self._agent.check_xfer_state(write)
            if "ERR" in states.values() or time.monotonic() > until:
                raise OSError(0, "another host is not reached")
            if not is_told and "PROC" not in states.values():
                is_told = True
                for one in self._sockets.values():
                    one.sendall(b"t")
            heard, _, _ = select.select(list(waited_for), [], [], 0)
            for one in heard:
                if one.recv(1) != b"t":
                    raise OSError(0, "another host has gone")
                waited_for.discard(one)

    def _prepared(self, index: int, edge: Mapping[str, Any], there: int, name: str) -> list[Any]:
        """By slot, what writes it."""
        slots, size = range(edge["count"]), edge["slot_bytes"]
        here, other = (
            self._agent.prep_xfer_dlist(
                agent, [(begin + slot * size, edge["used_bytes"], 0) for slot in slots], "DRAM"
            )
            for agent, begin in (("NIXL_INIT_AGENT", _address(self._memory[index])), (name, there))
        )
        return [
            self._agent.make_prepped_xfer("WRITE", here, [slot], other, [slot]) for slot in slots
        ]

    def _connect(self, others: Mapping[str, Mapping[str, Any]]) -> None:
        """The lower of two comes to the higher; both speak over that, of all their edges."""
        for rank in sorted(map(int, others)):
            if rank > self._rank:
                other = others[str(rank)]
                self._sockets[rank] = self._connected(rank, other)
        until = time.monotonic() + _CONNECTING_SECONDS
        while len(self._sockets) < len(others):
            self._listening.settimeout(max(0.0, until - time.monotonic()))
            came, _ = self._listening.accept()
            came.settimeout(_ANSWER_SECONDS)
            # A stranger's connection is dropped; the carrier that is waited for comes yet.
            try:
                rank = self._accepted(came, others)
            except OSError:
                came.close()
                continue
            came.settimeout(_CONNECTING_SECONDS)
            self._sockets[rank] = came
        self._listening.close()
        for made in self._sockets.values():
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _connected(self, rank: int, other: Mapping[str, Any]) -> socket.socket:
        """To the carrier of that rank, once both have proved that they know the cookies."""
        made = socket.create_connection((other["address"], other["port"]), _CONNECTING_SECONDS)
        try:
            key = self._key(self._rank, other["cookie"], rank)
            own, theirs = secrets.token_bytes(_CHALLENGE_BYTES), _received(made, _CHALLENGE_BYTES)
            made.sendall(_RANK.pack(self._rank) + own + _digest(key, b"came", theirs, own))
            answer = _received(made, _DIGEST_BYTES)
            if not hmac.compare_digest(answer, _digest(key, b"met", own, theirs)):
                raise OSError(0, f"what answers for rank {rank} is not its carrier")
        except BaseException:
            made.close()
            raise
        return made

    def _accepted(self, came: socket.socket, others: Mapping[str, Mapping[str, Any]]) -> int:
        """The rank whose carrier it is; raises OSError if it does not prove that it is one."""
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        came.sendall(own)
        (rank,) = _RANK.unpack(_received(came, _RANK.size))
        theirs, proof = _received(came, _CHALLENGE_BYTES), _received(came, _DIGEST_BYTES)
        if str(rank) not in others or rank >= self._rank or rank in self._sockets:
            raise OSError(0, "no rank that is to come")
        key = self._key(rank, others[str(rank)]["cookie"], self._rank)
        if not hmac.compare_digest(proof, _digest(key, b"came", own, theirs)):
            raise OSError(0, "a stranger")
        came.sendall(_digest(key, b"met", theirs, own))
        return int(rank)

    def _key(self, lower: int, other: str, higher: int) -> bytes:
        """Of a pair of carriers: their cookies, and the token that all of the run have, if any."""
        pair = sorted((self._cookie, other))
        token = os.environ.get("STEELYARD_TOKEN", "").encode(errors="surrogateescape")
        return _digest(token, f"{lower} {higher} {pair[0]} {pair[1]}".encode(), b"", b"")

    # --- carrying

    def carry(self) -> None:
        """Until the rank, or another carrier, ends."""
        asked, answers = select.poll(), self._answers()
        for number in answers:
            asked.register(number, select.POLLIN)
        while True:
            for number, _ in self._heard(asked):
                if not answers[number]():
                    return

    def _answers(self) -> dict[int, Callable[[], bool]]:
        """By file: what is done when something is to be read there; False where it has ended."""
        found: dict[int, Callable[[], bool]] = {}
        for rank, number in _numbers(self._setup["bells"]):
            found[number] = _Words(number, _BELL.size, self._sender(rank)).read
        for rank, number in _numbers(self._setup["given_back"]):
            found[number] = _Words(number, _CREDIT.size, self._teller(rank, b"c")).read
        for rank, made in self._sockets.items():
            found[made.fileno()] = _Words(made.fileno(), 1 + _BELL.size, self._hearer(rank)).read
        return found

    def _sender(self, target: int) -> Callable[[bytes], None]:
        def send(bell: bytes) -> None:
            _, index, _, _, slot = _BELL.unpack(bell)
            write = self._writes[index][slot]
            self._agent.transfer(write)
            self._under_way[target].append((write, bell))

        return send

    def _teller(self, rank: int, kind: bytes) -> Callable[[bytes], None]:
        made = self._sockets[rank]

        def tell(words: bytes) -> None:
            made.sendall((kind + words).ljust(1 + _BELL.size, b"\0"))

        return tell

    def _hearer(self, rank: int) -> Callable[[bytes], None]:
        """Bells from there are for the rank here, and so are slots that were given back there."""
        rings = dict(_numbers(self._setup["rings"])).get(rank)
        frees = dict(_numbers(self._setup["frees"])).get(rank)

        def hear(words: bytes) -> None:
            if words[:1] == b"b":
                assert rings is not None
                os.write(rings, words[1:])
            else:
                assert frees is not None
                os.write(frees, words[1 : 1 + _CREDIT.size])

        return hear

    def _heard(self, asked: select.poll) -> Sequence[tuple[int, int]]:
        begin = time.monotonic()
        while True:
            self._agent.get_new_notifs()
            self._ring()
            if not any(self._under_way.values()):
                return asked.poll(_HELP_MS)
            if heard := asked.poll(0):
                return heard
            if time.monotonic() - begin > _SPIN_SECONDS:
                time.sleep(_NAP_SECONDS)

    def _ring(self) -> None:
        """Of what has arrived, in order."""
        for target, writes in self._under_way.items():
            while writes:
                state = self._agent.check_xfer_state(writes[0][0])
                if state == "PROC":
                    break
                if state == "ERR":
                    raise OSError(0, f"rank {target} cannot be written to")
                self._teller(target, b"b")(writes.popleft()[1])


def _received(made: socket.socket, size: int) -> bytes:
    found = made.recv(size, socket.MSG_WAITALL)
    if len(found) < size:
        raise OSError(0, "another carrier has gone")
    return found


def _digest(key: bytes, side: bytes, asked: bytes, own: bytes) -> bytes:
    return hmac.digest(key, side + b"|" + asked + own, "sha256")


class _Words:
    """What comes over a file, word by word of one size."""

    def __init__(self, number: int, size: int, take: Callable[[bytes], None]) -> None:
        self._number, self._size, self._take = number, size, take
        self._rest = b""

    def read(self) -> bool:
        said = os.read(self._number, _MANY)
        if not said:
            return False
        whole = self._rest + said
        end = len(whole) - len(whole) % self._size
        for begin in range(0, end, self._size):
            self._take(whole[begin : begin + self._size])
        self._rest = whole[end:]
        return True


def _numbers(files: Mapping[str, int]) -> list[tuple[int, int]]:
    return [(int(rank), number) for rank, number in files.items()]


def _mapped(edge: Mapping[str, Any]) -> mmap.mmap:
    return mmap.mmap(edge["file"], edge["nbytes"])


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def main() -> None:
    # What asks a rank to stop is sent to all processes of its group; this one ends behind it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is nothing that was asked

    def say(what: Mapping[str, Any]) -> None:
        print(json.dumps(what), file=out, flush=True)

    try:
        carrier = NixlProxy(json.loads(sys.stdin.readline()))
        say(carrier.offered)
        carrier.meet(json.loads(sys.stdin.readline()))
    except Exception as error:  # noqa: BLE001 - NIXL's have nothing in common; the rank tells it
        say({"failed": f"{type(error).__name__}: {error}"})
        return
    say({})
    with contextlib.suppress(BrokenPipeError, ConnectionError):  # whoever is gone is missed there
        carrier.carry()


if __name__ == "__main__":
    main()
