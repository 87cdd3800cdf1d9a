"""The network interfaces and addresses of this host.

Not for choosing one of them: see run/launch/network_interface.py.
"""

import fcntl
import socket
import struct

# Linux ioctl: returns the address of an interface, in bytes 20 to 23 of the answer.
_SIOCGIFADDR, _ANSWER_BYTES, _LONGEST_NAME = 0x8915, 256, 15
# Nothing is sent to this port: connecting a datagram socket only looks up the route.
_ANY_PORT = 9


def address_towards(host: str) -> str:
    """Return this host's address on the route to ``host``; empty if there is no route."""
    if not host:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, _ANY_PORT))
        except OSError:  # an unknown host or no route: the rendezvous gives a better error
            return ""
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of the interface with this address; empty if there is none."""
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address and address_of(name) == address), "")


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        request = struct.pack(f"{_ANSWER_BYTES}s", interface.encode()[:_LONGEST_NAME])
        try:
            answer = fcntl.ioctl(query.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
        return socket.inet_ntoa(answer[20:24])
