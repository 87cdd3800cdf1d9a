"""How well a software stack uses a device: what its kernels reach, and which calls it runs as one.

For pricing steps that are nowhere run. Not for what a device could reach: see device.py.
"""

from dataclasses import dataclass
from enum import Enum

from steelyard.errors import BadInput
from steelyard.hardware.device import Device


class StageSendMode(Enum):
    """How stages wait for what they hand each other: for both ways at once, for one after another,
    or not at all, since both go beside what is computed."""

    AT_ONCE = "at once"
    IN_TURN = "in turn"
    BESIDE = "beside"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareStack:
    """The shares that kernels reach of a device's peak while they compute, and of its bandwidth
    while they move; ``attention_share`` of the former is what kernels of attention reach.
    ``call_seconds`` is what a call takes however small it is; None is what the device says.

    ``fuses``: calls that give as many elements as they take run as one. ``flat``: parts of weights
    and gradients are exchanged a block at a time, and copied to one place and format for it; else
    each on its own. ``rings_only``: gathers and scatters know no other algorithm.
    ``overlaps_tensor``: tensor ranks add up gradients, and gather again, beside the products that
    make the weights' gradients.
    """

    peak_share: float = 1.0
    bandwidth_share: float = 1.0
    attention_share: float = 1.0
    call_seconds: float | None = None
    fuses: bool = True
    flat: bool = True
    rings_only: bool = False
    overlaps_tensor: bool = False
    handing: StageSendMode = StageSendMode.AT_ONCE

    def __post_init__(self) -> None:
        shares = (self.peak_share, self.bandwidth_share, self.attention_share)
        if not all(0 < share <= 1 for share in shares):
            raise BadInput(
                f"a stack that reaches the shares {shares} of a device",
                expected="shares above 0, and of 1 at most",
                remedy="correct the stack, or declare a faster device",
            )


def stack_on(device: Device) -> SoftwareStack:
    """One that fuses, and reaches what is known to be reached there; where nothing is, all."""
    reached = device.reached
    if reached is None:
        return SoftwareStack()
    return SoftwareStack(
        peak_share=reached.share,
        bandwidth_share=reached.share,
        attention_share=reached.attention_share,
        call_seconds=reached.call_seconds,
    )
