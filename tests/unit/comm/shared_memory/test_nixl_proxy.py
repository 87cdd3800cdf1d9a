"""Proxies of several hosts find each other, and reject any other process."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from steelyard.comm.shared_memory import nixl_proxy as carrier
from steelyard.comm.shared_memory.nixl_proxy import NixlProxy


def made(rank: int) -> NixlProxy:
    """Make a proxy that can connect to others, without NIXL."""
    own = object.__new__(NixlProxy)
    own._rank, own._sockets, own._cookie = rank, {}, f"cookie of {rank}"
    own._listening = socket.create_server(("127.0.0.1", 0))
    return own


def offered(own: NixlProxy) -> dict[str, Any]:
    address, port = own._listening.getsockname()
    return {"address": address, "port": port, "cookie": own._cookie}


def meet(carriers: list[NixlProxy], said: list[dict[str, Any]]) -> list[str]:
    """Return the error of each rank, if any."""
    wrong = [""] * len(carriers)

    def one(own: NixlProxy) -> None:
        try:
            own._connect({str(n): it for n, it in enumerate(said) if n != own._rank})
        except OSError as error:
            wrong[own._rank] = error.strerror or str(error)

    threads = [threading.Thread(target=one, args=(own,)) for own in carriers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in carriers:
        own._listening.close()
    return wrong


def close(carriers: list[NixlProxy]) -> None:
    for own in carriers:
        for each in own._sockets.values():
            each.close()


@pytest.mark.parametrize("token", ["", "the secret of this run"])
def test_carriers_of_three_ranks_meet(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_TOKEN", token)
    carriers = [made(rank) for rank in range(3)]
    assert meet(carriers, [*map(offered, carriers)]) == ["", "", ""]
    for own in carriers:
        assert own._sockets.keys() == {0, 1, 2} - {own._rank}
    carriers[0]._sockets[2].sendall(b"to the last")
    assert carriers[2]._sockets[0].recv(11) == b"to the last"
    close(carriers)


def _claims_a_rank(stranger: socket.socket) -> None:
    stranger.sendall(struct.pack("<I", 0) + bytes(64))


def _claims_a_rank_that_is_none(stranger: socket.socket) -> None:
    stranger.sendall(struct.pack("<I", 2**32 - 1) + bytes(64))


def _says_too_little(stranger: socket.socket) -> None:
    stranger.sendall(b"GET")
    stranger.shutdown(socket.SHUT_WR)


def _sends_back_what_it_hears(stranger: socket.socket) -> None:
    heard = stranger.recv(32, socket.MSG_WAITALL)
    stranger.sendall(struct.pack("<I", 0) + heard + heard)


@pytest.mark.parametrize(
    "act",
    [_claims_a_rank, _claims_a_rank_that_is_none, _says_too_little, _sends_back_what_it_hears],
)
def test_a_stranger_that_connects_first_is_rejected(
    act: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "_ANSWER_SECONDS", 1.0)
    carriers = [made(rank) for rank in range(2)]
    said = [*map(offered, carriers)]
    with socket.create_connection((said[1]["address"], said[1]["port"])) as stranger:
        stranger.settimeout(60)
        acting = threading.Thread(target=act, args=(stranger,))
        acting.start()
        assert meet(carriers, said) == ["", ""]
        acting.join()
        carriers[0]._sockets[1].sendall(b"it is me")
        assert carriers[1]._sockets[0].recv(8) == b"it is me"
    close(carriers)


def test_a_proxy_without_the_cookies_is_rejected() -> None:
    """Another process listens where rank 1 was announced."""
    own = made(0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address, port = listening.getsockname()
        said = [offered(own), {"address": address, "port": port, "cookie": "cookie of 1"}]

        def answer() -> None:
            came, _ = listening.accept()
            with came:
                came.sendall(bytes(32))
                came.recv(4 + 32 + 32, socket.MSG_WAITALL)
                came.sendall(bytes(32))

        answering = threading.Thread(target=answer)
        answering.start()
        assert meet([own], said) == ["the process that answered for rank 1 failed authentication"]
        answering.join()


def test_another_token_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    own = made(0)
    keys = set()
    for token in ("", "the secret of this run", "the secret of another"):
        monkeypatch.setenv("STEELYARD_TOKEN", token)
        keys.add(own._key(0, "cookie of 1", 1))
    own._listening.close()
    assert len(keys) == 3
