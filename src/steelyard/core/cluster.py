"""What a step runs on: classes of device and link, and how fast they are said or measured to be.

Not for measuring: see measure/.
"""

from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One class of device. The rates are declared or measured ceilings, not averages.

    ``call_seconds`` is what launching any operator costs, however small.
    """

    kind: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: int
    call_seconds: float = 5e-6
    threads: int = 1
    is_here: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One class of link between devices, declared or measured; the rate is one way."""

    kind: str
    latency_seconds: float
    bytes_per_second: float

    def seconds(self, nbytes: int, *, messages: int) -> float:
        return messages * self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices a plan may use."""

    device: Device
    num_devices: int = 1

    @property
    def fingerprint(self) -> str:
        return sha256(
            f"{self.device.kind}|{self.device.threads}|{self.num_devices}".encode()
        ).hexdigest()[:16]

    @classmethod
    def here(cls) -> "Cluster":
        """The machine this runs on, as the operating system describes it; touches no device."""
        from steelyard.core.machine import this_device

        return cls(device=this_device())
