"""The answer to "will it fit": the memory of one step, a device, and what would make it fit.

Not for measuring the step: see capture/deep/eager_levels.py. Not for plans: see plan.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from steelyard.hardware.device import Device

# The CUDA context, the libraries' workspaces and what the driver keeps, beside torch's allocator.
_CONTEXT_BYTES = 600 * 2**20
_DRIVER_SHARE = 0.02
# Nine of ten published peaks are within this share of the estimate; see benchmarks/fit.py.
DOUBT = 0.1
# Steps with sharded weights are not held against published peaks, only their differences.
SHARDED_DOUBT = 0.2
# The share of the declared peak that training reaches: 38 to 43 % for Llama 3 of 405 billion
# parameters on H100 (arXiv 2407.21783, table 4).
UTILIZATION = 0.4


class FitVerdict(StrEnum):
    """``tight``: it may fit, but the difference is smaller than the error of the estimate."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"


# The caching allocator of a GPU reserves this share more than the tensors take: the median of 52
# published runs of PEFT (benchmarks/fit.py).
_RESERVED_SHARE = 0.055


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The bytes that torch's allocator reserves at the peak of a step, by what they are for.

    On several devices they are those of one of them, which keeps its shard of weights, gradients
    and state. ``gathered_bytes`` are whole weights and gradients beside the shards.
    ``working_bytes`` are activations, if the peak is in the forward or backward pass, and the
    optimizer's temporary results, if it is in the optimizer's step (``in_update``).
    """

    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    working_bytes: int
    in_update: bool
    on_gpu: bool
    gathered_bytes: int = 0

    @property
    def tensor_bytes(self) -> int:
        resident = self.weight_bytes + self.gradient_bytes + self.state_bytes
        return resident + self.working_bytes + self.gathered_bytes

    @property
    def allocator_bytes(self) -> int:
        """The bytes that the caching allocator reserves beyond those of the tensors."""
        return int(self.tensor_bytes * _RESERVED_SHARE) if self.on_gpu else 0

    @property
    def nbytes(self) -> int:
        return self.tensor_bytes + self.allocator_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The memory of one device, and the part of it that torch's allocator can use.

    ``count`` devices shard weights, gradients and optimizer state, and divide the batch.
    """

    kind: str
    memory_bytes: int
    is_gpu: bool
    count: int = 1

    @classmethod
    def of(cls, device: Device, *, count: int = 1) -> "Capacity":
        return cls(
            kind=device.kind,
            memory_bytes=device.memory_bytes,
            is_gpu=not device.is_here,
            count=count,
        )

    @property
    def doubt(self) -> float:
        """The relative error of an estimate for these devices."""
        return DOUBT if self.count == 1 else SHARDED_DOUBT

    @property
    def usable_bytes(self) -> int:
        if not self.is_gpu:
            return self.memory_bytes
        return int(self.memory_bytes * (1 - _DRIVER_SHARE)) - _CONTEXT_BYTES

    def verdict(self, nbytes: int) -> FitVerdict:
        if nbytes > self.usable_bytes:
            return FitVerdict.DOES_NOT_FIT
        has_room = nbytes * (1 + self.doubt) <= self.usable_bytes
        return FitVerdict.FITS if has_room else FitVerdict.TIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """Changes to the step, the memory of the changed step, and what the changes cost.

    ``step_share`` is the time that they add to a step, as a share of it; None if that is unknown.
    """

    changes: tuple[str, ...]
    pays: str
    nbytes: int
    step_share: float | None = None

    @property
    def name(self) -> str:
        return ", and ".join(self.changes)


def without_needless(levers: Iterable[Lever]) -> tuple[Lever, ...]:
    """Leave out each lever that contains all changes of another one."""
    found = tuple(levers)
    sets = [set(lever.changes) for lever in found]
    return tuple(
        lever for lever, mine in zip(found, sets, strict=True) if not any(s < mine for s in sets)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The answer for a step and a device.

    ``samples`` are those of one device, if several divide the batch. ``levers`` are the changes
    that make it fit, cheapest first. ``least`` is the change that needs the least memory, if none
    is enough.
    """

    title: str
    capacity: Capacity
    need: MemoryNeed
    samples: int | None = None
    levers: tuple[Lever, ...] = ()
    least: Lever | None = None

    @property
    def verdict(self) -> FitVerdict:
        return self.capacity.verdict(self.need.nbytes)

    @property
    def fits(self) -> bool:
        return self.verdict is FitVerdict.FITS
