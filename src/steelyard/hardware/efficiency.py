"""What programs reach of a class of device's declared rates, and who says so.

For pricing steps that are nowhere run. Not for what else is known of software: see
software_stack.py.
"""

from dataclasses import dataclass, field

from steelyard.errors import BadInput
from steelyard.hardware.calibration import Calibration, percent


@dataclass(frozen=True, slots=True, kw_only=True)
class AchievedFraction:
    """``share`` is of the peak while kernels compute and of the bandwidth while they move,
    ``attention_share`` what kernels of attention reach of the former. ``call_seconds`` is what a
    call takes however small it is; None is what the device says. ``source`` says on what steps it
    was fitted, and ``median_error`` how far off others of these were then, where a cluster file
    says so; of a preset, ``calibration`` says both.
    """

    share: float
    attention_share: float = 1.0
    call_seconds: float | None = None
    source: str = ""
    median_error: float | None = None
    # Says nothing of what the device does: plans for it stay those for the same device.
    calibration: Calibration | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or not 0 < self.attention_share <= 1:
            raise BadInput(
                f"kernels that reach {self.share:.3g} of a device, {self.attention_share:.3g} of "
                "that in attention",
                expected="shares above 0, and of 1 at most",
                remedy="correct the shares, or declare a faster device",
            )

    @property
    def said(self) -> str:
        at = f"at {self.share:.0%} of its declared rates".replace("%", " %")
        if self.calibration is not None:
            return f"{at}, which was fitted on {self.calibration.fitted.said}"
        if not self.source:
            return f"{at}, as the cluster file says"
        error = "" if self.median_error is None else f"; median error {percent(self.median_error)}"
        return f"{at}: fitted on {self.source}{error}"
