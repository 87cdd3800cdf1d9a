"""Forwards packets between two hosts, each after a delay, like a long link.

    python benchmarks/_relay.py PID PID DEVICE SECONDS

Opens a device in the network of each process, prints ``up`` when both exist, and ends with the
process that started it. Not for rates: tc limits what a host sends before it arrives here.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_SET_DEVICE, _IS_TUN, _BARE = 0x400454CA, 0x0001, 0x1000
_NETWORK = 0x40000000
_LARGEST = 1 << 16
# The most packets that are under way at a time, as in the queue of a router. Further packets stay
# in the device's queue, which drops them when it is full.
_MOST = 10_000


def opened(pid: str, device: str) -> int:
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(network, _NETWORK):
        raise OSError(ctypes.get_errno(), f"the network of {pid} cannot be entered")
    os.close(network)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _SET_DEVICE, struct.pack("16sH22x", device.encode(), _IS_TUN | _BARE))
    return tun


def hand_on(near: int, far: int, delay: float) -> None:
    """Forward packets in both directions until the process ends, each after ``delay`` seconds.

    Packets of one direction keep their order.
    """
    under_way: dict[int, deque[tuple[float, bytes]]] = {near: deque(), far: deque()}
    other = {near: far, far: near}
    while True:
        due = min((queue[0][0] for queue in under_way.values() if queue), default=None)
        patience = None if due is None else max(0.0, due - time.monotonic())
        for source in select.select([near, far], [], [], patience)[0]:
            _take(source, under_way[other[source]], delay)
        now = time.monotonic()
        for target, queue in under_way.items():
            while queue and queue[0][0] <= now:
                _give(target, queue.popleft()[1])


def _take(source: int, queue: deque[tuple[float, bytes]], delay: float) -> None:
    while len(queue) < _MOST:
        try:
            packet = os.read(source, _LARGEST)
        except BlockingIOError:
            return
        queue.append((time.monotonic() + delay, packet))


def _give(target: int, packet: bytes) -> None:
    try:
        os.write(target, packet)
    except OSError:
        return  # the queue is full or the device is down: a wire loses such packets too


def main(near: str, far: str, device: str, seconds: str) -> None:
    ends = [opened(pid, device) for pid in (near, far)]
    print("up", flush=True)
    hand_on(*ends, float(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
