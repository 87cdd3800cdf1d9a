"""A choice of how the tensors of one step lie on the ranks of a mesh axis.

Not for what is possible or what it costs.
"""

from dataclasses import dataclass

from steelyard.core.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """``inputs`` names parameters and buffers that lie in parts, ``values`` results that are laid
    out so as soon as they are there; the rest follows from these.
    """

    axis: str
    num_ranks: int
    inputs: tuple[tuple[str, Placement], ...] = ()
    values: tuple[tuple[str, Placement], ...] = ()
