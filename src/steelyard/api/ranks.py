"""The process groups that a plan's mesh axes stand for, in a process that is one of the ranks.

Not for starting ranks, nor for joining them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from steelyard.core.errors import Mismatch
from steelyard.core.layout import DATA, Layout
from steelyard.exchange.channel import Channel


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which of the ranks this process is, and over what it speaks along each axis."""

    rank: int = 0
    channels: Mapping[str, Channel] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: Layout) -> "Ranks":
        """Of the process group that this process has joined."""
        if layout.num_ranks == 1:
            return cls()
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        here = group.size() if group is not None else 1
        if group is None or here != layout.num_ranks:
            raise Mismatch(
                f"the plan is for {layout.num_ranks} ranks, and here "
                + (f"are {here}" if group is not None else "is one process"),
                expected="as many ranks as the plan was made for, in one process group",
                remedy="steelyard run starts them; or torchrun, with init_process_group before "
                "apply; or plan again for this many",
            )
        return cls(rank=group.rank(), channels={DATA: Channel.of(group)})
