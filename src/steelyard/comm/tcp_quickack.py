"""Immediate TCP acknowledgements, for messages in one direction between two ranks.

A host delays the acknowledgement of data for up to 40 ms, hoping to send it with data of its own.
A sender whose congestion window is full (it is small when a connection starts, and again after
the kernel takes a packet for lost) then waits that long with the rest of a message. Not for
all-reduces: in a ring, data goes both ways.
"""

import contextlib
import socket
import weakref

from steelyard.comm.tcp_counters import connections, detach_sockets

# On other kernels than Linux nothing changes.
_IS_SUPPORTED = hasattr(socket, "TCP_QUICKACK")


class QuickAcks:
    """Immediate acknowledgements on the connections that are open when this is made. They are a
    hint to the kernel."""

    def __init__(self) -> None:
        self._connections = connections() if _IS_SUPPORTED else []
        weakref.finalize(self, detach_sockets, self._connections)

    def at_once(self) -> None:
        """Acknowledge at once until the kernel reverts to delays, which it does as soon as both
        sides have sent."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it may have been closed
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
