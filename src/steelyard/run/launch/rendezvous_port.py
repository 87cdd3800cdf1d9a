"""The rendezvous port, open only on the interface that leads to the other ranks.

By default, a TCPStore listens on all interfaces; this one gets a socket that is already bound. Not
for gloo's interface: see network_interface.py.
"""

import errno
import ipaddress
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public by its documentation

from steelyard.comm.network_interfaces import address_of
from steelyard.errors import BadInput
from steelyard.run.launch.environment import RankInfo
from steelyard.run.launch.network_interface import VARIABLE
from steelyard.safe_text import printable

_BACKLOG = 4096
# A process that joins two rendezvous at the same address still has the first store.
_SERVED: dict[tuple[str, int], TCPStore] = {}


def served_store(who: RankInfo, environ: Mapping[str, str], *, timeout: timedelta) -> TCPStore:
    """Return the store that rank 0 hosts in this process."""
    refused = []
    for address in addresses(who, environ):
        known = _SERVED.get((address, who.port))
        if known is not None:
            return known
        try:
            listening = _bound(address, who.port)
        except OSError as error:
            refused.append(f"{address}: {error.strerror}")
            # not an address of this host, for example because of NAT
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            break
        store = TCPStore(
            address,
            who.port,
            who.size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        _SERVED[address, who.port] = store
        return store
    problem = "; ".join(refused) or f"{printable(who.address)} is a loopback address"
    raise BadInput(
        f"rank 0 cannot listen for the others at port {who.port} ({problem})",
        expected="MASTER_ADDR to be an address of the first rank's host that the others reach",
        remedy=f"correct MASTER_ADDR or MASTER_PORT, or name the interface in {VARIABLE}",
    )


def addresses(who: RankInfo, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the addresses to listen on, the likeliest first. This is MASTER_ADDR, unless it
    resolves to loopback and ranks come from other hosts.
    """
    is_number = _is_address(who.address)
    for address in _resolved(who.address):
        if is_number or who.hosts == 1 or not ipaddress.ip_address(address).is_loopback:
            yield "127.0.0.1" if ipaddress.ip_address(address).is_unspecified else address
    if not is_number or who.hosts > 1:
        names = [name for _, name in socket.if_nameindex()]
        others = [a for a in map(address_of, names) if a and not a.startswith("127.")]
        named = address_of(environ.get(VARIABLE, ""))
        if named:
            yield named
        elif len(others) == 1:
            yield others[0]


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)


def _resolved(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:  # there is no such name; the ranks that use it report the error
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
