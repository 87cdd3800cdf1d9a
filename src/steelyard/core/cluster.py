"""What a step runs on: classes of device and link, and how fast they are said or measured to be.

Not for measuring: see measure/.
"""

from dataclasses import dataclass
from hashlib import sha256

from steelyard.core.amounts import format_bytes, parse_bytes, parse_rate
from steelyard.core.errors import BudgetError


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
    """One class of link between devices, declared or measured; the rate is one way.

    ``doubt`` is the share by which a transfer may take more or less than is said here.
    ``call_seconds`` is what the device itself spends on a message, and ``disturbs`` the share of
    the time that a transfer takes by which it slows what runs beside it.
    """

    kind: str
    latency_seconds: float
    bytes_per_second: float
    doubt: float = 0.5
    call_seconds: float = 0.0
    disturbs: float = 0.0

    def seconds(self, nbytes: int, *, messages: int) -> float:
        return messages * self.latency_seconds + nbytes / self.bytes_per_second

    def device_seconds(self, nbytes: int, *, messages: int) -> float:
        """What so many messages take of the device."""
        return messages * self.call_seconds + self.disturbs * nbytes / self.bytes_per_second


FAR_PAGE_BYTES = 4096
# Slower than this nothing is gained, and a unit was forgotten more likely.
_SLOWEST = 1e6
# The axes of the links to and from far memory: a rank speaks to itself, over time.
FAR_OUT, FAR_IN = "far out", "far in"
# Near memory for the pieces in which they are moved, one for each direction.
FAR_PIECE_BYTES = 1 << 20


def far_room(nbytes: int) -> int:
    """What a value takes in far memory: whole pages."""
    return -(-nbytes // FAR_PAGE_BYTES) * FAR_PAGE_BYTES


@dataclass(frozen=True, slots=True, init=False)
class Far:
    """A farther memory: files in ``folder``, at most ``bytes_per_second`` each way, at most
    ``size_bytes`` of them.

    ``Far("/scratch", rate="500 MB/s", size="20 GiB")`` reads amounts as people write them. The rate
    is kept to: a transfer that could be faster waits.
    """

    folder: str
    bytes_per_second: float
    size_bytes: int

    def __init__(self, folder: object, rate: str | float, size: str | int) -> None:
        object.__setattr__(self, "folder", str(folder))
        object.__setattr__(self, "bytes_per_second", parse_rate(rate))
        if self.bytes_per_second < _SLOWEST or not self.folder:
            slow = f"a rate of {format_bytes(self.bytes_per_second)}/s"
            raise BudgetError(
                f"{slow if self.folder else 'an empty name'} is no far memory",
                expected="a folder, used at 1 MB/s or more",
                remedy='write it as 500MB/s, or Far("/scratch", rate="500 MB/s", size="20 GiB")',
            )
        object.__setattr__(self, "size_bytes", parse_bytes(size, what="size"))
        if self.size_bytes < FAR_PAGE_BYTES:
            raise BudgetError(
                f"a size of {format_bytes(self.size_bytes)} holds no value",
                expected="room for what is to be moved",
                remedy="write it as 20GiB",
            )

    def __str__(self) -> str:
        rate, size = format_bytes(self.bytes_per_second), format_bytes(self.size_bytes)
        return f"{size} in {self.folder} at {rate}/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices a plan may use, and the farther memory that each may move values to."""

    device: Device
    num_devices: int = 1
    far: Far | None = None

    @property
    def fingerprint(self) -> str:
        return sha256(
            f"{self.device.kind}|{self.device.threads}|{self.num_devices}".encode()
        ).hexdigest()[:16]

    @classmethod
    def here(cls, *, ranks: int = 1, far: Far | None = None) -> "Cluster":
        """The machine this runs on, as the operating system describes it; touches no device.

        With several ``ranks`` each is a device of its own: an equal part of the cores.
        """
        from steelyard.core.machine import this_device

        return cls(device=this_device(ranks=ranks), num_devices=ranks, far=far)
