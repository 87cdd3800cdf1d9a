"""Connections over TCP that this process has with others: who they are, and what the kernel says.

They are others' (gloo's): they are only looked at, and nothing here keeps one open. Not for
speaking over them.
"""

import contextlib
import os
import socket
import stat
import struct
import weakref
from pathlib import Path

_OPEN = Path("/proc/self/fd")
# Where struct tcp_info says what was sent and what of that again, in eight bytes each.
_SENT = struct.Struct("=200xQQ")


def connections() -> list[socket.socket]:
    """Those there are now, to be given back (``give_back``); none where the kernel is another."""
    opened = _OPEN.iterdir() if _OPEN.exists() else ()
    lent = [_connection(int(one.name)) for one in opened]
    return [one for one in lent if one is not None]


def give_back(lent: list[socket.socket]) -> None:
    """Or they would be closed with what stands for them here."""
    for connection in lent:
        connection.detach()


class SentBytesCounter:
    """What went to others over the connections that there are when it looks: each byte that was
    handed to one of them, once. ``is_counted`` where the kernel tells so much."""

    def __init__(self) -> None:
        self.is_counted = True
        self._connections: list[socket.socket] = []
        weakref.finalize(self, give_back, self._connections)

    def look(self) -> None:
        """Which connections there are by now."""
        give_back(self._connections)
        self._connections[:] = connections()

    @property
    def sent_bytes(self) -> int:
        total = 0
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it may have been closed
                said = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT.size)
                if len(said) < _SENT.size:  # it is an older one
                    self.is_counted = False
                    continue
                sent, again = _SENT.unpack(said)
                total += sent - again
        return total


def _connection(number: int) -> socket.socket | None:
    """None of what only listens, and of what is none."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        lent = socket.socket(fileno=number)
    except OSError:  # closed meanwhile: the folder's own, for one
        return None
    if _is_connected(lent):
        return lent
    lent.detach()
    return None


def _is_connected(lent: socket.socket) -> bool:
    is_inet = lent.family in (socket.AF_INET, socket.AF_INET6)
    if not is_inet or lent.type != socket.SOCK_STREAM:
        return False
    try:
        lent.getpeername()
    except OSError:
        return False  # nobody is at the other end
    return True
