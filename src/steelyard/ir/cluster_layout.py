"""How a step of a deep model of equal blocks lies on many devices, and in which formats it counts.

For pricing steps that are nowhere run. Not for plans that are run: see parallel_layout.py.
"""

from dataclasses import dataclass

from steelyard.errors import BadInput
from steelyard.ir.rule import CallSite


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """``count`` alike modules in the list ``path``, from index ``first`` to its end; none where
    ``count`` is 0."""

    path: str = ""
    first: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLayout:
    """``tensor`` ranks are neighbours, those of ``data`` come next, those of ``pipeline`` last.

    Each of ``pipeline`` ranks holds ``virtual`` runs of blocks, and works on ``micro_batches``;
    ``stage_blocks`` says how many blocks each holds where that is not alike.
    ``state_stage`` is ZeRO's. ``again`` is what runs again in the backward pass: modules inside
    each block by name ("" is the whole block), or calls in them. ``spared`` names modules in these
    that do not, whose results are kept. ``overlaps``: gradients are exchanged while the last
    backward pass runs. ``draws_parts``: each tensor rank draws its own part of what is random,
    where Steelyard's own ranks draw it whole. ``gathers_again``: what was gathered from tensor
    ranks is not kept whole, and gathered anew for the backward pass. ``far_states``: what the
    optimizer keeps lies in the memory of the host, and comes from there for the update.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batches: int = 1
    virtual: int = 1
    stage_blocks: tuple[int, ...] = ()
    state_stage: int = 0
    again: tuple[str | CallSite, ...] = ()
    spared: tuple[str, ...] = ()
    overlaps: bool = False
    draws_parts: bool = False
    gathers_again: bool = False
    far_states: bool = False

    def __post_init__(self) -> None:
        degrees = (self.tensor, self.pipeline, self.data, self.micro_batches, self.virtual)
        if min(degrees) < 1 or self.state_stage not in range(4):
            raise BadInput(
                f"a layout of degrees {degrees} and state stage {self.state_stage}",
                expected="degrees of 1 and more, and a stage from 0 to 3",
                remedy="correct the layout",
            )

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def schedule(self) -> str:
        """By torch's name."""
        return "Interleaved1F1B" if self.virtual > 1 else "1F1B"

    def blocks_of_stage(self, num_blocks: int, stage: int = 0) -> int:
        if self.stage_blocks:
            return self._given(num_blocks)[stage]
        parts = self.pipeline * self.virtual
        if num_blocks % parts:
            raise BadInput(
                f"{num_blocks} blocks in {parts} equal runs",
                expected="as many blocks in each of the stages and virtual stages",
                remedy="choose a pipeline and virtual degree that divide the number of blocks",
            )
        return num_blocks // self.pipeline

    def _given(self, num_blocks: int) -> tuple[int, ...]:
        counts = self.stage_blocks
        if len(counts) != self.pipeline or sum(counts) != num_blocks or min(counts) < 1:
            raise BadInput(
                f"{num_blocks} blocks in stages of {counts}",
                expected=f"{self.pipeline} stages of one block and more, with all blocks in them",
                remedy="correct the blocks of the stages",
            )
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Bytes for each parameter: of the weights that are computed with, of the gradient that is kept
    and exchanged, and of what the optimizer keeps: its moments, and weights in a wider format.

    ``update_bytes`` are what an update reads and writes, where it is known of an optimizer; else
    weights and gradients are taken once, and what is kept twice.
    """

    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    update_bytes: int | None = None

    @property
    def moved_by_update(self) -> int:
        if self.update_bytes is not None:
            return self.update_bytes
        return self.gradient_bytes + self.weight_bytes + 2 * self.state_bytes


# Weights and gradients in half precision, weights again and two moments in single.
MIXED = Formats(weight_bytes=2, gradient_bytes=2, state_bytes=12)
# As Megatron-LM keeps it: gradients are added up and exchanged in single precision.
MIXED_WIDE_GRADIENTS = Formats(weight_bytes=2, gradient_bytes=4, state_bytes=12)
SINGLE = Formats(weight_bytes=4, gradient_bytes=4, state_bytes=8)
