"""Over which of its interfaces this host reaches another.

Not for which of them is taken: see run/launch/network_interface.py.
"""

import fcntl
import socket
import struct

# Linux: the address of an interface, in bytes 20 to 23 of what is said of it.
_SIOCGIFADDR, _SAID_BYTES, _LONGEST_NAME = 0x8915, 256, 15
# Nothing is sent there: a socket of datagrams only looks up the way.
_ANY_PORT = 9


def address_towards(host: str) -> str:
    """This host's own, on the way to that one; empty where there is none."""
    if not host:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as looking:
        try:
            looking.connect((host, _ANY_PORT))
        except OSError:  # no such name, or no way there: joining says so in its own words
            return ""
        return str(looking.getsockname()[0])


def interface_of(address: str) -> str:
    """Its name; empty where no interface has this address."""
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address and address_of(name) == address), "")


def address_of(interface: str) -> str:
    """Empty where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asked = struct.pack(f"{_SAID_BYTES}s", interface.encode()[:_LONGEST_NAME])
        try:
            said = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, asked)
        except OSError:
            return ""
        return socket.inet_ntoa(said[20:24])
