"""A rendezvous port listens only on the interface that leads to the other ranks."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from steelyard.comm.network_interfaces import address_of
from steelyard.errors import BadInput
from steelyard.run.launch import network_interface as interface
from steelyard.run.launch import rendezvous as join
from steelyard.run.launch import rendezvous_port as listening
from steelyard.run.launch.environment import RankInfo, rank_info
from steelyard.run.launch.rendezvous_port import addresses, served_store
from tests.system.launch.test_launcher import listening as listened_at

SECONDS = timedelta(seconds=20)


def free_port(address: str = "127.0.0.1") -> int:
    with socket.create_server((address, 0)) as free:
        return int(free.getsockname()[1])


def first(address: str, *, hosts: int = 1, port: int = 1) -> RankInfo:
    return RankInfo(rank=0, size=2, hosts=hosts, address=address, port=port)


def own_addresses() -> list[str]:
    found = [address_of(name) for _, name in socket.if_nameindex()]
    return [address for address in found if address]


def test_a_store_listens_on_the_rendezvous_address_only() -> None:
    for address in own_addresses():
        before = listened_at([os.getpid()])
        store = served_store(first(address, port=free_port(address)), {}, timeout=SECONDS)
        store.set("a", "b")
        assert store.get("a") == b"b"
        new = listened_at([os.getpid()]) - before
        assert new <= {socket.inet_aton(address)[::-1].hex().upper()}, address
    # 0.0.0.0 and ::, in the format of /proc/net.
    assert not {"0" * 8, "0" * 32} & listened_at([os.getpid()])


def test_a_process_that_joins_twice_has_one_store() -> None:
    who = first("127.0.0.1", port=free_port())
    assert served_store(who, {}, timeout=SECONDS) is served_store(who, {}, timeout=SECONDS)


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        who = first("127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(BadInput, match="Address already in use") as refused:
            served_store(who, {}, timeout=SECONDS)
    assert len(str(refused.value).splitlines()) == 3


def test_numeric_addresses_are_used_and_loopback_names_are_replaced_for_other_hosts() -> None:
    assert [*addresses(first("127.0.0.1"), {})] == ["127.0.0.1"]
    assert next(addresses(first("127.0.0.1", hosts=2), {})) == "127.0.0.1"
    assert "127.0.0.1" in addresses(first("localhost"), {})
    assert "127.0.0.1" not in addresses(first("localhost", hosts=2), {})
    assert [*addresses(first("localhost", hosts=2), {"GLOO_SOCKET_IFNAME": "lo"})] == ["127.0.0.1"]
    assert [*addresses(first("::1"), {})] == ["::1"]
    assert "0.0.0.0" not in addresses(first("0.0.0.0", hosts=2), {})


@pytest.mark.parametrize("others", [[], ["10.0.0.1", "10.1.0.1"]])
def test_no_interface_is_guessed_from_none_or_several(
    others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"lo": "127.0.0.1", **{f"eth{n}": address for n, address in enumerate(others)}}
    monkeypatch.setattr(socket, "if_nameindex", lambda: [*enumerate(names)])
    monkeypatch.setattr(listening, "address_of", lambda name: names.get(name, ""))
    who = first("localhost", hosts=2)
    assert [*addresses(who, {})] == []
    assert [*addresses(who, {"GLOO_SOCKET_IFNAME": "eth1"})] == others[1:]
    with pytest.raises(BadInput, match="a loopback address"):
        served_store(who, {}, timeout=SECONDS)


def test_ranks_of_one_host_use_loopback() -> None:
    said = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": socket.gethostname(), "MASTER_PORT": "1"}
    environ: dict[str, str] = {}
    interface.set_interface_on_one_host(rank_info({**said, "GROUP_WORLD_SIZE": "1"}), environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo"}
    own = {"GLOO_SOCKET_IFNAME": "eth7"}
    interface.set_interface_on_one_host(rank_info({**said, "GROUP_WORLD_SIZE": "1"}), own)
    assert own == {"GLOO_SOCKET_IFNAME": "eth7"}
    environ = {}
    interface.set_interface_on_one_host(rank_info({**said, "MASTER_ADDR": "127.0.0.1"}), environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo"}


def test_an_invalid_address_from_another_host_is_refused() -> None:
    assert interface._address_in(b"10.0.0.1") == "10.0.0.1"
    for said in (b"", b"\xff", b"evil.example", b"10.0.0.1\n", b"10.0.0.1; id"):
        assert interface._address_in(said) == ""


def test_no_source_file_listens_on_all_interfaces() -> None:
    root = Path(__file__).resolve().parents[4]
    for path in (root / "src").rglob("*.py"):
        text = path.read_text()
        assert '"0.0.0.0"' not in text, path
        assert "is_master=who" not in text, path


@pytest.mark.parametrize(
    ("address", "hosts", "token", "is_said"),
    [
        ("127.0.0.1", 1, "", False),
        ("127.0.0.1", 2, "", False),
        ("::1", 1, "", False),
        ("localhost", 1, "", False),
        # On each host this name means its own loopback; ranks of other hosts need another address.
        ("localhost", 2, "", True),
        ("10.0.0.1", 1, "", True),
        ("10.0.0.1", 2, "", True),
        ("10.0.0.1", 2, "the secret of this run", False),
    ],
)
def test_a_reachable_rendezvous_without_a_secret_prints_a_note(
    address: str, hosts: int, token: str, is_said: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("STEELYARD_TOKEN", token)
    monkeypatch.setattr(join, "_store_at_port", lambda *_: HashStore())
    who = RankInfo(rank=0, size=1, hosts=hosts, address=address, port=29500)
    join.meeting_place(who, timeout_seconds=1)
    said = capsys.readouterr().err
    assert said.count("\n") == int(is_said)
    assert ("without a shared secret" in said) == is_said
