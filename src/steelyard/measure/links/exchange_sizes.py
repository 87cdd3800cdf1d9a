"""Byte sizes of the exchanges that measurements of links time.

Not for timing them: see exchange_timing.py.
"""

from typing import NamedTuple

import torch


class ExchangeSizes(NamedTuple):
    """Byte sizes of exchanges: negligible, large enough to show a rate, and larger than caches."""

    small: int
    middle: int
    large: int


SIZES = {
    "cpu": ExchangeSizes(4096, 1 << 20, 16 << 20),
    "cuda": ExchangeSizes(4096, 16 << 20, 128 << 20),
}


def sizes_of(torch_device: torch.device, hosts: int) -> ExchangeSizes:
    """Return the sizes for CPUs if there are several hosts: those for GPUs would take minutes."""
    return SIZES["cpu" if hosts > 1 else torch_device.type]
