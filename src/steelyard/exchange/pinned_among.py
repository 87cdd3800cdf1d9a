"""Slots among ranks, wherever these are: in memory that they share, of their host or of its GPUs,
or written on another host.

Not for any of these ways: see pinned.py, pinned_on_gpus.py and pinned_between.py.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from steelyard.core.pinned import Edge
from steelyard.exchange.devices import CPU
from steelyard.exchange.gathered import gathered
from steelyard.exchange.gpus import Gpu
from steelyard.exchange.pinned import Pinned, host
from steelyard.exchange.pinned_between import BetweenHosts, is_able
from steelyard.exchange.pinned_on_gpus import OnGpus


def pinned_among(
    edges: Sequence[Edge], *, group: dist.ProcessGroup, device: torch.device = CPU
) -> Pinned:
    """Made by all ranks of the group together, in the same way; what is sent lies on ``device``."""
    if device.type == "cuda":
        return OnGpus(edges, group=group, gpu=Gpu(device))
    everyones = gathered((host(), is_able()), tuple[str, bool], group=group)
    are_apart = len({where for where, _ in everyones}) > 1
    if are_apart and all(able for _, able in everyones):
        return BetweenHosts(edges, group=group)
    return Pinned(edges, group=group)
