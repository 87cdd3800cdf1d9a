"""The parallel layout and the number formats of a deep model of equal blocks on a cluster.

For pricing steps that are not run. Not for plans that are run: see parallel_layout.py.
"""

from dataclasses import dataclass

from steelyard.errors import BadInput
from steelyard.ir.rule import CallSite


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """``count`` equal modules in the list ``path``, from index ``first`` to its end.

    There are none if ``count`` is 0.
    """

    path: str = ""
    first: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLayout:
    """The parallel degrees of a step, and its recomputation.

    ``tensor`` ranks are neighbours, then ``data``, then ``pipeline``. Every pipeline rank has
    ``virtual`` runs of blocks and processes ``micro_batches``; ``stage_blocks`` are the numbers
    of blocks of each rank if these are unequal. ``state_stage`` is ZeRO's. ``again`` is
    recomputed in the backward pass: modules inside each block by name ("" is the whole block), or
    calls in them. ``spared`` names modules inside these whose results are saved. ``overlaps``:
    gradients are reduced during the last backward pass. ``draws_parts``: each tensor rank draws
    its own part of random values, while Steelyard's own ranks draw them whole. ``gathers_again``:
    values gathered from tensor ranks are not saved but regathered for the backward pass.
    ``far_states``: the optimizer state is in host memory and is fetched for the update.
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
                f"a layout cannot have degrees {degrees} and state stage {self.state_stage}",
                expected="degrees of at least 1, and a stage from 0 to 3",
                remedy="correct the layout",
            )

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def schedule(self) -> str:
        """The name of the schedule in torch."""
        return "Interleaved1F1B" if self.virtual > 1 else "1F1B"

    def blocks_of_stage(self, num_blocks: int, stage: int = 0) -> int:
        if self.stage_blocks:
            return self._checked_stage_blocks(num_blocks)[stage]
        parts = self.pipeline * self.virtual
        if num_blocks % parts:
            raise BadInput(
                f"{num_blocks} blocks cannot be divided into {parts} equal runs",
                expected="the same number of blocks in each stage and virtual stage",
                remedy="choose a pipeline and virtual degree that divide the number of blocks",
            )
        return num_blocks // self.pipeline

    def _checked_stage_blocks(self, num_blocks: int) -> tuple[int, ...]:
        counts = self.stage_blocks
        if len(counts) != self.pipeline or sum(counts) != num_blocks or min(counts) < 1:
            raise BadInput(
                f"{num_blocks} blocks do not match stages of {counts}",
                expected=f"{self.pipeline} stages of at least one block, with all blocks assigned",
                remedy="correct the blocks of the stages",
            )
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Bytes per parameter of weights, gradients and optimizer state.

    ``weight_bytes`` are those of the weight used in computation. ``state_bytes`` include the
    moments and any wider copy of the weight. ``update_bytes`` are the bytes that an update reads
    and writes, if known of an optimizer; otherwise weights and gradients count once, and the
    optimizer state twice.
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


# Weights and gradients in half precision; a copy of the weights and two moments in single.
MIXED = Formats(weight_bytes=2, gradient_bytes=2, state_bytes=12)
# As in Megatron-LM: gradients are accumulated and exchanged in single precision.
MIXED_WIDE_GRADIENTS = Formats(weight_bytes=2, gradient_bytes=4, state_bytes=12)
SINGLE = Formats(weight_bytes=4, gradient_bytes=4, state_bytes=8)
