"""The equal blocks of a deep model: their place, activation policies and number formats.

Not for how a step is distributed: see parallel_layout.py.
"""

from dataclasses import dataclass

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
class ActivationPolicy:
    """The recompute and offload policy of a block's activations.

    ``recomputed`` are calls, by module path inside the block. ``recomputed_modules`` are names of
    modules inside the block ("" is the whole block); ``spared`` are modules inside these whose
    results are saved nevertheless. If ``is_offloaded``, all other saved activations are offloaded
    to host memory.
    """

    recomputed: tuple[CallSite, ...] = ()
    recomputed_modules: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    is_offloaded: bool = False

    @property
    def recomputes(self) -> bool:
        return bool(self.recomputed or self.recomputed_modules)


SAVE_ALL = ActivationPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Bytes per parameter of weights, gradients and optimizer state.

    ``weight_bytes`` are those of the weight used in computation. ``state_bytes`` include the
    moments and any wider copy of the weight. ``update_bytes`` are the bytes that an update reads
    and writes, if known for the optimizer. Otherwise weights and gradients count once, and the
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


# Weights and gradients in half precision; a copy of the weights and two moments in single
# precision.
MIXED = Formats(weight_bytes=2, gradient_bytes=2, state_bytes=12)
# As in Megatron-LM, gradients are accumulated and exchanged in single precision.
MIXED_WIDE_GRADIENTS = Formats(weight_bytes=2, gradient_bytes=4, state_bytes=12)
SINGLE = Formats(weight_bytes=4, gradient_bytes=4, state_bytes=8)
