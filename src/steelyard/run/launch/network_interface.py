"""Select the network interface over which a host reaches the others.

By default gloo uses the interface of the host's own name, on many machines loopback, which no
other host reaches. A GLOO_SOCKET_IFNAME set by the user is respected. Not for the rendezvous: see
rendezvous.py.
"""

import ipaddress
from collections.abc import MutableMapping

from torch.distributed import Store  # type: ignore[attr-defined]  # public by its documentation

from steelyard.comm.network_interfaces import address_towards, interface_of
from steelyard.run.launch.environment import RankInfo

VARIABLE = "GLOO_SOCKET_IFNAME"


def set_interface_on_one_host(who: RankInfo, environ: MutableMapping[str, str]) -> None:
    """Use loopback if all ranks are known to be on one host, else the interface of MASTER_ADDR."""
    name = "lo" if who.is_one_host else interface_of(address_towards(who.address))
    if name:
        environ.setdefault(VARIABLE, name)


def set_interface_between_hosts(
    store: Store, who: RankInfo, environ: MutableMapping[str, str]
) -> None:
    """Use the interface towards the first host, or, on the first host, towards the second: its
    own name may resolve to loopback."""
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
