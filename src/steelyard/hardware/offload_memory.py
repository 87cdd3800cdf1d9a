"""The offload memory of a device, and the names of its links.

Not for moving values: see offload/tier.py.
"""

from dataclasses import dataclass

from steelyard.errors import BudgetError
from steelyard.units import format_bytes, parse_bytes, parse_rate

OFFLOAD_PAGE_BYTES = 4096
# In place of a folder: the memory of a declared device's host, over its host link.
_HOST = "the memory of the host"
# Offloading to a slower memory gains nothing; more likely a unit was forgotten.
_SLOWEST = 1e6
# The axis names of the links to and from offload memory. On them, a rank communicates with itself
# at a later time.
OFFLOAD_OUT, OFFLOAD_IN = "offload out", "offload in"
# Bytes of the device buffer for transfers, one for each direction; transfers are split into pieces.
OFFLOAD_PIECE_BYTES = 1 << 20


def offload_room(nbytes: int) -> int:
    """Return the bytes that a value occupies in offload memory: whole pages."""
    return -(-nbytes // OFFLOAD_PAGE_BYTES) * OFFLOAD_PAGE_BYTES


@dataclass(frozen=True, slots=True, init=False)
class OffloadMemory:
    """An offload memory: files in ``folder``, with a maximum size and a maximum rate each way.

    ``OffloadMemory("/scratch", rate="500 MB/s", size="20 GiB")`` parses amounts as texts. The
    rate is enforced: a transfer that could be faster waits.
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
                f"{slow if self.folder else 'an empty name'} cannot be used as offload memory",
                expected="a folder, and a rate of 1 MB/s or more",
                remedy="write it as 500MB/s, or "
                'OffloadMemory("/scratch", rate="500 MB/s", size="20 GiB")',
            )
        object.__setattr__(self, "size_bytes", parse_bytes(size, what="size"))
        if self.size_bytes < OFFLOAD_PAGE_BYTES:
            raise BudgetError(
                f"a size of {format_bytes(self.size_bytes)} is too small to hold a value",
                expected="a size that holds the offloaded values",
                remedy="write it as 20GiB",
            )

    @classmethod
    def of_host(cls, *, rate: float, size: int) -> "OffloadMemory":
        """Return the memory of a declared device's host."""
        return cls(_HOST, rate=rate, size=size)

    @property
    def is_host(self) -> bool:
        """True for the memory of a declared device's host, which no folder stands for."""
        return self.folder == _HOST

    def __str__(self) -> str:
        rate, size = format_bytes(self.bytes_per_second), format_bytes(self.size_bytes)
        return f"{size} in {self.folder} at {rate}/s"
