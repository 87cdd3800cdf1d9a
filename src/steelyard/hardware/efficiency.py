"""The fraction of declared device rates that programs achieve, with its source.

It serves to price steps for devices that are not here. Not for other facts about software: see
software_stack.py.
"""

from dataclasses import dataclass, field

from steelyard.errors import BadInput
from steelyard.hardware.calibration import Calibration, percent


@dataclass(frozen=True, slots=True, kw_only=True)
class AchievedFraction:
    """The fraction of a device class's declared rates that programs achieve.

    ``share`` applies to the peak while kernels compute and to the bandwidth while they move data.
    Attention kernels achieve ``attention_share`` of that fraction of the peak. ``call_seconds`` is
    the minimum time of a call; None means the device's own value. In a cluster file, ``source``
    names the steps to which it was fitted, and ``median_error`` the error on other steps. In a
    preset, ``calibration`` holds both.
    """

    share: float
    attention_share: float = 1.0
    call_seconds: float | None = None
    source: str = ""
    median_error: float | None = None
    # Excluded from comparison: the calibration does not change the device, so plans stay valid.
    calibration: Calibration | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or not 0 < self.attention_share <= 1:
            raise BadInput(
                f"kernels have an efficiency of {self.share:.3g}, and "
                f"{self.attention_share:.3g} times that in attention",
                expected="shares above 0 and at most 1",
                remedy="correct the shares, or declare a faster device",
            )

    @property
    def said(self) -> str:
        at = f"at {self.share:.0%} of its declared rates".replace("%", " %")
        if self.calibration is not None:
            return f"{at}, which was fitted on {self.calibration.fitted.said}"
        if not self.source:
            return f"{at}, as declared in the cluster file"
        error = "" if self.median_error is None else f"; median error {percent(self.median_error)}"
        return f"{at}: fitted on {self.source}{error}"
