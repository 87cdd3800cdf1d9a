"""A choice of how the tensors of one step lie on the ranks of a mesh axis.

Not for what is possible or what it costs.
"""

from dataclasses import dataclass

from steelyard.ir.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingChoice:
    """``inputs`` names parameters and buffers that lie in parts, ``values`` results that are laid
    out so as soon as they are there; the rest follows from these.
    """

    axis: str
    num_ranks: int
    inputs: tuple[tuple[str, Placement], ...] = ()
    values: tuple[tuple[str, Placement], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Parameters that are best cut together: from a whole value to a sum, nothing is exchanged.

    ``sums`` are the results of the forward pass that come out in terms, ``wholes`` the values whose
    gradients do, and ``exchanged_bytes`` the sizes of both: each is reduced over all ranks once a
    step. ``flops`` is what the ranks divide among them of the forward pass.
    """

    path: str
    inputs: tuple[tuple[str, Placement], ...]
    sums: tuple[str, ...]
    wholes: tuple[str, ...]
    parameter_bytes: int
    exchanged_bytes: int
    flops: int
