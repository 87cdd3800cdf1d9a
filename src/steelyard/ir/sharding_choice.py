"""A choice of placements for the tensors of one step on the ranks of a mesh axis.

Not for finding choices or their costs.
"""

from dataclasses import dataclass

from steelyard.ir.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingChoice:
    """A sharding of one step: the given placements, from which all others follow.

    ``inputs`` places parameters and buffers; ``values`` places results as soon as they are
    computed.
    """

    axis: str
    num_ranks: int
    inputs: tuple[tuple[str, Placement], ...] = ()
    values: tuple[tuple[str, Placement], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Parameters that are best sharded together, because nothing is exchanged inside the region.

    A region begins at a replicated value and ends in a sum. ``sums`` are the forward results that
    are partial sums, and ``wholes`` the values whose gradients are. ``exchanged_bytes`` are the
    sizes of both: each is reduced over all ranks once per step. ``flops`` are the forward FLOPs
    that the ranks divide among themselves.
    """

    path: str
    inputs: tuple[tuple[str, Placement], ...]
    sums: tuple[str, ...]
    wholes: tuple[str, ...]
    parameter_bytes: int
    exchanged_bytes: int
    flops: int
