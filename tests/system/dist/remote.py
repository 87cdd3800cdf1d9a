"""The scenarios of slots with messages written by NIXL, over TCP, as if between hosts.

Not for checking the results: the tests do that.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from steelyard.errors import BadInput
from steelyard.comm.shared_memory import transport as among
from steelyard.comm.shared_memory import remote_host as between
from steelyard.comm.shared_memory.remote_host import RdmaTransport
from steelyard.measure.links.worker import figures_of_this_rank
from tests.system.dist import pipelines, slots


def _there(scenario: Callable[[int], Any]) -> Callable[[int], Any]:
    def scenario_there(rank: int) -> Any:
        with mock.patch.object(slots, "SharedMemoryTransport", RdmaTransport):
            return scenario(rank)

    return scenario_there


exchanged, made_there = _there(slots.exchanged), _there(slots.made_there)
kept_away, broken_off, silent = map(_there, (slots.kept_away, slots.broken_off, slots.silent))


def _as_two_hosts(rank: int) -> Any:
    """Simulate an RDMA device, because NIXL reports that it uses TCP."""
    return mock.patch.multiple(among, host=lambda: f"host {rank}", is_able=lambda: True)


def chosen(rank: int) -> dict[str, str]:
    """Return the transports chosen for ranks of one host, of two hosts, and of two hosts one of
    which lacks RDMA."""
    edges = [slots.edge(0, 64), slots.edge(1, 64)]
    found = {"one host": type(among.shared_memory_transport(edges, group=_everyone())).__name__}
    with _as_two_hosts(rank):
        made = among.shared_memory_transport(edges, group=_everyone())
        found["two hosts"] = type(made).__name__
        dist.barrier()
        made.close()
        with mock.patch.object(among, "is_able", lambda: rank == 0):
            found["one is not able"] = type(among.shared_memory_transport(edges, group=_everyone())).__name__
    return found


def refused(rank: int) -> dict[str, str]:
    """Simulate a fault on rank 1; both ranks report it, and neither waits."""
    faults = {
        "no agent": mock.patch.dict(os.environ, UCX_TLS="nothing"),
        "no way": mock.patch.object(between, "_own_address", lambda: "192.0.2.1"),
    }
    with mock.patch.object(slots, "SharedMemoryTransport", RdmaTransport):
        return slots.said_of(faults, rank)


def asked_to_stop(rank: int) -> bool:
    """Send the stop signal to the rank's whole process group; the rank still completes its step."""
    made = RdmaTransport([slots.edge(0, 64), slots.edge(1, 64)], group=_everyone())
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(made._carrier._process.pid, number)
    made.begin()
    x = torch.full((16,), float(rank))
    made.send(rank, 0, [x])
    (came,) = made.receive(1 - rank, 0, [(x.shape, x.dtype)])
    made.settle()
    dist.barrier()
    return bool(torch.equal(came, torch.full((16,), float(1 - rank))))


def measured(rank: int) -> list[str]:
    """Return the figures of slots among those of hosts."""
    with (
        _as_two_hosts(rank),
        mock.patch("steelyard.measure.links.rank_speeds._COMPUTING_SECONDS", 0.05),
        mock.patch("steelyard.measure.links.worker.ROUNDS", 2),
        mock.patch("steelyard.measure.links.exchange_timing.ROUNDS", 2),
    ):
        return sorted(figures_of_this_rank(hosts=2))


def staged(rank: int) -> dict[str, Any]:
    """Train a model in two stages for some steps, with messages of gloo and with those of NIXL."""
    schedules = {"1F1B": 2, "ZBVZeroBubble": 4}
    with _as_two_hosts(rank):
        found = pipelines._run("gpt", schedules, in_slots=tuple(schedules))
    assert isinstance(found, dict)
    return found


def _everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


if __name__ == "__main__":
    with mock.patch.object(slots, "SharedMemoryTransport", RdmaTransport):
        slots.main(sys.argv[1], int(sys.argv[2]))
