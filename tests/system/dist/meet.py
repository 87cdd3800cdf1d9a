"""Two ranks that act as two hosts and meet to measure their link. See test_meet.py."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import FileStore

from steelyard.planner.multi_host import HostRendezvous, own_device
from steelyard.errors import RanksDiffer
from steelyard.measure.links.probe import measured_ranks
from steelyard.run.launch.environment import RankInfo


def measuring(rank: int) -> dict[str, Any]:
    """Let the first rank request two measurements from the device of the tensors, then send a
    plan."""
    with _met(rank) as one:
        if rank:
            return {"heard": one.receive()}
        with one.with_background_load():
            torch_device = own_device(torch.get_default_device().type)
            found = [measured_ranks(2, hosts=2, torch_device=torch_device) for _ in range(2)]
        one.broadcast("a plan")
        link = found[0].link
        return {"same": found[0] == found[1], "rate": link.bytes_per_second, "kind": link.kind}


def of_other_kinds(rank: int) -> str:
    """Let one rank have no GPU while the other has one."""
    with (
        mock.patch("steelyard.planner.multi_host.gpu_description", lambda *_: {"kind of device": f"{rank}"}),
        _met(rank) as one,
    ):
        try:
            if rank:
                return one.receive()
            with one.with_background_load():
                measured_ranks(2, hosts=2)
        except RanksDiffer as error:
            if not rank:
                one.broadcast("it failed")
            return error.happened
    return "nothing"


@contextlib.contextmanager
def _met(rank: int) -> Iterator[HostRendezvous]:
    """Meet without a process group, as hosts do."""
    dist.destroy_process_group()
    with tempfile.TemporaryDirectory() as own:
        os.environ["STEELYARD_CACHE"] = f"{own}/costs.sqlite"
        shared = Path(tempfile.gettempdir()) / f"met-by-children-of-{os.getppid()}"
        who = RankInfo(rank=rank, size=2, hosts=2, address="127.0.0.1")
        # Measuring the speed of each rank takes a while, so the time is shortened.
        with mock.patch("steelyard.measure.links.rank_speeds._COMPUTING_SECONDS", 0.1):
            yield HostRendezvous(who=who, store=FileStore(str(shared), 2))
        again = f"file://{shared}-again"
        dist.init_process_group("gloo", init_method=again, rank=rank, world_size=2)
        dist.barrier()
        for file in (shared, Path(f"{shared}-again")):
            file.unlink(missing_ok=True)
