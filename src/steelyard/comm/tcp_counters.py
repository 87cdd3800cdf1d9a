"""The open TCP connections of this process: their peers and the kernel's counters.

The connections belong to others, such as gloo. They are only inspected, and nothing here keeps
one open. Not for communicating over them.
"""

import contextlib
import os
import socket
import stat
import struct
import weakref
from pathlib import Path

_OPEN = Path("/proc/self/fd")
# The bytes sent and the bytes retransmitted in struct tcp_info, eight bytes each.
_SENT = struct.Struct("=200xQQ")


def connections() -> list[socket.socket]:
    """Return the current connections, which the caller must give back with ``detach_sockets``;
    empty if the kernel is not Linux.
    """
    descriptors = _OPEN.iterdir() if _OPEN.exists() else ()
    borrowed = [_connection(int(entry.name)) for entry in descriptors]
    return [connection for connection in borrowed if connection is not None]


def detach_sockets(borrowed: list[socket.socket]) -> None:
    """Detach the sockets; otherwise Python would close the connections together with these
    objects.
    """
    for connection in borrowed:
        connection.detach()


class SentBytesCounter:
    """Counts bytes sent over the connections that were open at the last ``look``, without
    retransmissions. ``is_counted`` is False if the kernel is too old to count them.
    """

    def __init__(self) -> None:
        self.is_counted = True
        self._connections: list[socket.socket] = []
        weakref.finalize(self, detach_sockets, self._connections)

    def look(self) -> None:
        """Find the connections that are open now."""
        detach_sockets(self._connections)
        self._connections[:] = connections()

    @property
    def sent_bytes(self) -> int:
        total = 0
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it may have been closed in the meantime
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT.size)
                if len(info) < _SENT.size:  # an older kernel
                    self.is_counted = False
                    continue
                sent, retransmitted = _SENT.unpack(info)
                total += sent - retransmitted
        return total


def _connection(number: int) -> socket.socket | None:
    """Return the connected TCP socket with this file descriptor; None for anything else."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        borrowed = socket.socket(fileno=number)
    except OSError:  # closed in the meantime, such as the descriptor of the folder itself
        return None
    if _is_connected(borrowed):
        return borrowed
    borrowed.detach()
    return None


def _is_connected(borrowed: socket.socket) -> bool:
    is_inet = borrowed.family in (socket.AF_INET, socket.AF_INET6)
    if not is_inet or borrowed.type != socket.SOCK_STREAM:
        return False
    try:
        borrowed.getpeername()
    except OSError:
        return False  # no peer: it only listens
    return True
