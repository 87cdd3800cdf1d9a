"""Receipts over TCP at once, for messages that go one way between two ranks.

A host puts the receipt of what has come off for up to 40 ms, in the hope of something to send with
it. A sender that may not have more on its way (a connection starts with little, and does so again
where the kernel took a packet for lost) then waits as long with the rest of a message. Not for
all-reduces: what goes round goes both ways.
"""

import contextlib
import socket
import weakref

from steelyard.comm.tcp_counters import connections, give_back

# Where the kernel is another, all is as it was.
_CAN_BE_ASKED = hasattr(socket, "TCP_QUICKACK")


class QuickAcks:
    """Of the connections that this process has when it is made: what they are asked is a hint."""

    def __init__(self) -> None:
        self._connections = connections() if _CAN_BE_ASKED else []
        weakref.finalize(self, give_back, self._connections)

    def at_once(self) -> None:
        """Until the kernel thinks otherwise, which it does as soon as both sides have sent."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it may have been closed
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
