"""Efficiency of a software stack: achieved fractions of device rates, and fused calls.

It serves to price steps for devices that are not here. Not for a device's peak rates: see
device.py.
"""

from dataclasses import dataclass
from enum import Enum

from steelyard.errors import BadInput
from steelyard.hardware.device import Device


class StageSendMode(Enum):
    """The way in which pipeline stages wait for their sends and receives.

    Stages wait for both directions at once, for one after the other, or not at all because both
    overlap with computation.
    """

    AT_ONCE = "at once"
    IN_TURN = "in turn"
    BESIDE = "beside"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareStack:
    """The efficiency and the communication strategy of a software stack.

    ``peak_share`` is the fraction of a device's peak that kernels achieve while they compute, and
    ``bandwidth_share`` that of its bandwidth while they move data. Attention kernels achieve
    ``attention_share`` of the former. ``call_seconds`` is the minimum time of a call; None means
    the device's own value.

    ``fuses``: calls with as many result elements as input elements run as one. ``flat``: shards of
    weights and gradients are exchanged block by block, after a copy into one contiguous buffer of
    one format; otherwise each tensor is exchanged on its own. ``rings_only``: all-gather and
    reduce-scatter use only the ring algorithm. ``overlaps_tensor``: tensor-parallel ranks reduce
    gradients, and gather again, concurrently with the weight gradient products.
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
                f"a software stack cannot reach the shares {shares} of a device",
                expected="shares above 0 and at most 1",
                remedy="correct the stack, or declare a faster device",
            )


def stack_on(device: Device) -> SoftwareStack:
    """Return a fusing stack with the achieved fractions that are known for the device; 1 for
    others.
    """
    reached = device.reached
    if reached is None:
        return SoftwareStack()
    return SoftwareStack(
        peak_share=reached.share,
        bandwidth_share=reached.share,
        attention_share=reached.attention_share,
        call_seconds=reached.call_seconds,
    )
