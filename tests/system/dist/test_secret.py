"""Two hosts with the same secret meet, and listen only on the interface to each other."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts import Hosts, NoHosts, address, hosts

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.xdist_group("between hosts")]

_ROOT = Path(__file__).resolve().parents[3]
_PORTS = iter(range(29617, 29650))
_SECRET = "the secret of this run"


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    try:
        with hosts(2, bits_per_second=None) as made:
            yield made
    except NoHosts as reason:
        pytest.skip(str(reason))


def met(pair: Hosts, folder: Path, *tokens: str) -> list[tuple[dict[str, Any], str]]:
    """Return what each rank printed on stdout and stderr; rank 0 opens the port itself."""
    port, started = next(_PORTS), []
    for host, token in enumerate(tokens):
        environ = {
            **os.environ, "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}", "OMP_NUM_THREADS": "1",
            "STEELYARD_TOKEN": token, "RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0",
            "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": address(0), "MASTER_PORT": str(port),
        }  # fmt: skip
        run = f"unset GLOO_SOCKET_IFNAME; exec {sys.executable} -m tests.system.dist.secret"
        said = f"cd {_ROOT} && {run} >{folder}/out{host} 2>{folder}/err{host}"
        started.append(pair.start(host, ["sh", "-c", said], environ))
    for one in started:
        assert one.wait(timeout=200) == 0
    return [
        (json.loads((folder / f"out{n}").read_text()), (folder / f"err{n}").read_text())
        for n in range(2)
    ]


def as_proc_has_it(host: int) -> str:
    return socket.inet_aton(address(host))[::-1].hex().upper()


@pytest.mark.parametrize("token", [_SECRET, ""])
def test_two_hosts_meet_and_each_listens_on_one_interface(
    token: str, pair: Hosts, tmp_path: Path
) -> None:
    for host, (said, err) in enumerate(met(pair, tmp_path, token, token)):
        assert said == {"total": 3.0, "listens": [as_proc_has_it(host)]}, err
        without = err.count("without a shared secret")
        assert without == int(host == 0 and not token), err


@pytest.mark.parametrize("other", ["the secret of another", ""])
def test_a_host_without_the_secret_is_refused_on_both(
    other: str, pair: Hosts, tmp_path: Path
) -> None:
    for said, err in met(pair, tmp_path, _SECRET, other):
        assert len(said["error"].splitlines()) == 3, (said, err)
        assert "STEELYARD_TOKEN" in said["error"]
