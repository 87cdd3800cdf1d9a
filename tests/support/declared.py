"""A declared device and links for tests of several ranks, so that nothing is measured."""

from __future__ import annotations

from steelyard.hardware.cluster import Device, Link
from steelyard.ir.parallel_layout import DATA, PIPELINE, TENSOR
from steelyard.predict.cost_table import CostTable

DEVICE = Device(kind="declared", flops_per_second=1e9, bytes_per_second=1e10, memory_bytes=1 << 40)


def costs(rate: float = 1e12) -> CostTable:
    """Costs with links of ``rate`` bytes per second among all ranks."""
    link = Link(kind="declared", latency_seconds=1e-6, bytes_per_second=rate)
    return CostTable(device=DEVICE, links=dict.fromkeys((DATA, TENSOR, PIPELINE), link))
