"""Selects the network interface over which a host reaches the others.

By default, gloo uses the interface to which the host's own name resolves. On many machines this is
loopback, which no other host can reach. A GLOO_SOCKET_IFNAME that the user has set is respected.
Not for the rendezvous: see rendezvous.py.
"""

import ipaddress
from collections.abc import MutableMapping

from torch.distributed import Store  # type: ignore[attr-defined]  # public by its documentation

from steelyard.comm.network_interfaces import address_towards, interface_of
from steelyard.run.launch.environment import RankInfo

VARIABLE = "GLOO_SOCKET_IFNAME"


def set_interface_on_one_host(who: RankInfo, environ: MutableMapping[str, str]) -> None:
    """Use loopback if all ranks are known to be on one host; otherwise, use the interface of
    MASTER_ADDR.
    """
    name = "lo" if who.is_one_host else interface_of(address_towards(who.address))
    if name:
        environ.setdefault(VARIABLE, name)


def set_interface_between_hosts(
    store: Store, who: RankInfo, environ: MutableMapping[str, str]
) -> None:
    """Use the interface towards the first host. On the first host, use that towards the second,
    because its own name may resolve to loopback.
    """
    ranks_per_host = who.size // who.hosts
    if who.rank >= ranks_per_host:
        towards = who.address
        if who.rank == ranks_per_host:
            store.set("second host", address_towards(towards))
    else:
        towards = _address_in(store.get("second host"))
    name = interface_of(address_towards(towards))
    if name:
        environ.setdefault(VARIABLE, name)


def _address_in(written: bytes) -> str:
    """Return the address that another host has written, or an empty text if it is not one."""
    try:
        return str(ipaddress.ip_address(written.decode("ascii")))
    except ValueError:
        return ""
