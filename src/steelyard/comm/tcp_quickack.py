"""Immediate TCP acknowledgements, for messages in one direction between two ranks.

A host delays the acknowledgement of data for up to 40 ms, hoping to send it with data of its own.
If the sender's congestion window is full, the rest of a message waits that long. The window is
small when a connection starts, and again after the kernel takes a packet for lost. Not for
all-reduces: in a ring, data goes both ways.
"""

import contextlib
import socket
import weakref

from steelyard.comm.tcp_counters import connections, detach_sockets

# On kernels other than Linux nothing changes.
_IS_SUPPORTED = hasattr(socket, "TCP_QUICKACK")


class QuickAcks:
    """Requests immediate acknowledgements on the connections that are open when this object is
    made. The kernel may ignore these requests.
    """

    def __init__(self) -> None:
        self._connections = connections() if _IS_SUPPORTED else []
        weakref.finalize(self, detach_sockets, self._connections)

    def at_once(self) -> None:
        """Acknowledge at once until the kernel delays acknowledgements again, which it does as soon
        as both sides have sent.
        """
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it may have been closed
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
