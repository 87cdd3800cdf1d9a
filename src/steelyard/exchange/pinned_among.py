"""Slots among ranks, wherever these are: in memory that they share, or written on another host.

Not for either way: see pinned.py and pinned_between.py.
"""

from collections.abc import Sequence

import torch.distributed as dist

from steelyard.core.pinned import Edge
from steelyard.exchange.pinned import Pinned, host
from steelyard.exchange.pinned_between import BetweenHosts, is_able


def pinned_among(edges: Sequence[Edge], *, group: dist.ProcessGroup) -> Pinned:
    """Made by all ranks of the group together, in the same way."""
    everyones: list[tuple[str, bool]] = [("", False)] * dist.get_world_size(group)
    dist.all_gather_object(everyones, (host(), is_able()), group=group)
    are_apart = len({where for where, _ in everyones}) > 1
    if are_apart and all(able for _, able in everyones):
        return BetweenHosts(edges, group=group)
    return Pinned(edges, group=group)
