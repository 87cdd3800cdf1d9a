"""Over which of its interfaces a host reaches the others.

Gloo takes the one that the host's own name stands for, and on many machines that is the loopback,
where nobody else comes. Whoever sets GLOO_SOCKET_IFNAME knows better. Not for meeting: see join.py.
"""

import fcntl
import socket
import struct
from collections.abc import MutableMapping

from torch.distributed import Store  # type: ignore[attr-defined]  # public by its documentation

from steelyard.run.ranks.who import Who

_VARIABLE = "GLOO_SOCKET_IFNAME"
# Linux: the address of an interface, in bytes 20 to 23 of what is said of it.
_SIOCGIFADDR, _SAID_BYTES, _LONGEST_NAME = 0x8915, 256, 15
# Nothing is sent there: a socket of datagrams only looks up the way.
_ANY_PORT = 9


def speak_between_hosts(store: Store, who: Who, environ: MutableMapping[str, str]) -> None:
    """The others look towards the first rank, and that one towards the second: its own name may
    stand for its loopback."""
    if who.rank:
        towards = who.address
        if who.rank == 1:
            store.set("second", address_towards(towards))
    else:
        towards = store.get("second").decode()
    name = interface_of(address_towards(towards))
    if name:
        environ.setdefault(_VARIABLE, name)


def address_towards(host: str) -> str:
    """This host's own, on the way to that one; empty where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as looking:
        try:
            looking.connect((host, _ANY_PORT))
        except OSError:  # no such name, or no way there: joining says so in its own words
            return ""
        return str(looking.getsockname()[0])


def interface_of(address: str) -> str:
    """Its name; empty where no interface has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            asked = struct.pack(f"{_SAID_BYTES}s", name.encode()[:_LONGEST_NAME])
            try:
                said = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, asked)
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(said[20:24]) == address:
                return name
    return ""
