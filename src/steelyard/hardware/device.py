"""A class of device: compute rate, memory bandwidth, memory size, host memory and price.

Not for links between devices: see link.py and topology.py.
"""

from dataclasses import dataclass, replace

from steelyard.errors import BadInput
from steelyard.hardware.efficiency import AchievedFraction
from steelyard.hardware.link import Link

# The names that torch uses, plus "tf32": float32 operands, multiplied in the hardware's shorter
# format.
DTYPES = (
    "float64", "float32", "tf32", "float16", "bfloat16", "float8", "int8", "float4",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One class of device. The rates are declared or measured ceilings, not averages.

    ``flops_per_second`` is for float32, ``peaks`` for each dtype by name: dense, without sparsity.
    ``call_seconds`` is the cost of launching any operator. ``host_memory_bytes`` is one device's
    share, reached over ``host_link``. None means unknown, for example for the price. ``reached`` is
    the fraction of the rates that programs achieve, where known. ``speed`` is relative to the
    measured device, if ranks are unequal.
    """

    kind: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: int
    call_seconds: float = 5e-6
    threads: int = 1
    is_here: bool = False
    peaks: tuple[tuple[str, float], ...] = ()
    host_memory_bytes: int | None = None
    host_link: Link | None = None
    usd_per_hour: float | None = None
    reached: AchievedFraction | None = None
    speed: float = 1.0

    def at_speed(self, speed: float) -> "Device":
        """Return this device with all rates scaled by ``speed``."""
        return replace(
            self,
            flops_per_second=self.flops_per_second * speed,
            bytes_per_second=self.bytes_per_second * speed,
            call_seconds=self.call_seconds / speed,
            peaks=tuple((name, peak * speed) for name, peak in self.peaks),
            speed=self.speed * speed,
        )

    def peak_flops_per_second(self, dtype: str) -> float:
        known = {"float32": self.flops_per_second, **dict(self.peaks)}
        if dtype not in known:
            raise BadInput(
                f"the peak of {self.kind} in {dtype} is unknown",
                expected=f"one of {', '.join(known)}",
                remedy=f"declare peak.{dtype} in the cluster file",
            )
        return known[dtype]

    def flops_in(self, dtype: str) -> float:
        """Return the rate of operators with this result dtype; the float32 rate if no peaks are
        declared.
        """
        return self.peak_flops_per_second(dtype) if self.peaks else self.flops_per_second

    @property
    def identity(self) -> str:
        """All properties that a plan may depend on.

        The local device is identified by name, since its measured rates vary.
        """
        if self.is_here:
            slower = f"|{self.speed:.3g}" if self.speed != 1 else ""
            return f"{self.kind}|{self.threads}{slower}"
        host = None if self.host_link is None else self.host_link.identity
        properties = (
            self.kind, self.flops_per_second, self.bytes_per_second, self.memory_bytes,
            self.call_seconds, self.threads, self.peaks, self.host_memory_bytes, host,
        )  # fmt: skip
        return repr(properties if self.reached is None else (*properties, self.reached))

    @property
    def rates_said(self) -> str:
        """Describe the rates that are assumed for a device without measurements."""
        if self.reached is None:
            return f"{self.kind} at its declared peak, which programs do not reach"
        return f"{self.kind} {self.reached.said}"
