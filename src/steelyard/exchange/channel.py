"""The live process group behind a mesh axis, as operators and checks name it.

Not for bringing ranks up.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from steelyard.core.errors import Mismatch
from steelyard.core.program import Program
from steelyard.exchange.hazards import refuse_hazards


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """``group`` is the name under which torch's collectives find the process group."""

    group: str
    backend: str
    num_ranks: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Channel":
        return cls(group=group.group_name, backend=dist.get_backend(group), num_ranks=group.size())


def check_channels(program: Program, channels: Mapping[str, Channel]) -> None:
    """That the live groups are those the program was made for, and can carry it out."""
    nodes = program.graph.by_name
    for name in program.graph.collectives:
        collective = nodes[name].collective
        assert collective is not None
        if collective.is_far:
            continue
        channel = channels.get(collective.axis)
        ranks = channel.num_ranks if channel is not None else "no"
        if ranks != collective.num_ranks:
            raise Mismatch(
                f"the step exchanges data among {collective.num_ranks} ranks over the axis "
                f"{collective.axis!r}, where there are {ranks}",
                expected="a process group for each axis, of the size that was planned for",
                remedy="start as many ranks as the plan was made for, or plan again",
            )
    backends = {axis: channel.backend for axis, channel in channels.items()}
    refuse_hazards(program, backends=backends)
