"""The interface over which a host speaks to the others.

Gloo takes the one that the host's own name stands for, and on many machines that is the loopback,
where nobody else comes. Whoever sets GLOO_SOCKET_IFNAME knows better. Not for meeting: see
rendezvous.py.
"""

import ipaddress
from collections.abc import MutableMapping

from torch.distributed import Store  # type: ignore[attr-defined]  # public by its documentation

from steelyard.comm.network_interfaces import address_towards, interface_of
from steelyard.run.launch.environment import RankInfo

VARIABLE = "GLOO_SOCKET_IFNAME"


def speak_on_one_host(who: RankInfo, environ: MutableMapping[str, str]) -> None:
    """Loopback where all ranks are known to be on one host; else the interface of MASTER_ADDR."""
    name = "lo" if who.is_one_host else interface_of(address_towards(who.address))
    if name:
        environ.setdefault(VARIABLE, name)


def speak_between_hosts(store: Store, who: RankInfo, environ: MutableMapping[str, str]) -> None:
    """The others look towards the first host, and the ranks of that one towards the second: its own
    name may stand for its loopback."""
    of_a_host = who.size // who.hosts
    if who.rank >= of_a_host:
        towards = who.address
        if who.rank == of_a_host:
            store.set("second host", address_towards(towards))
    else:
        towards = _address_in(store.get("second host"))
    name = interface_of(address_towards(towards))
    if name:
        environ.setdefault(VARIABLE, name)


def _address_in(said: bytes) -> str:
    """What another host says is its address; empty where it is none."""
    try:
        return str(ipaddress.ip_address(said.decode("ascii")))
    except ValueError:
        return ""
