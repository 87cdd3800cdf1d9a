"""Receipts over TCP at once, for messages that go one way between two ranks.

A host puts the receipt of what has come off for up to 40 ms, in the hope of something to send with
it. A sender that may not have more on its way (a connection starts with little, and does so again
where the kernel took a packet for lost) then waits as long with the rest of a message. Not for
all-reduces: what goes round goes both ways.
"""

import contextlib
import os
import socket
import stat
import weakref
from pathlib import Path

_OPEN = Path("/proc/self/fd")
# Where the kernel is another, all is as it was.
_CAN_BE_ASKED = hasattr(socket, "TCP_QUICKACK") and _OPEN.exists()


class Receipts:
    """Of the connections that this process has when it is made.

    They are others' (gloo's, which has no such option): what they are asked is a hint, and nothing
    here keeps one open.
    """

    def __init__(self) -> None:
        opened = _OPEN.iterdir() if _CAN_BE_ASKED else ()
        lent = [_connection(int(o.name)) for o in opened]
        self._connections = [one for one in lent if one is not None]
        weakref.finalize(self, _give_back, self._connections)

    def at_once(self) -> None:
        """Until the kernel thinks otherwise, which it does as soon as both sides have sent."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it may have been closed
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _connection(number: int) -> socket.socket | None:
    """None of what only listens, and of what is none. It is to be detached, or it would be closed
    with what stands for it here."""
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


def _give_back(lent: list[socket.socket]) -> None:
    for connection in lent:
        connection.detach()
