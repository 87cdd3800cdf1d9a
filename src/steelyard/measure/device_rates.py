"""Peak rates of this device for products, copies and operator calls, from quick measurements.

They are ceilings for operators that are not measured themselves. Not for measured operators: see
measure/operators/benchmark.py.
"""

from dataclasses import replace
from statistics import median

import torch

from steelyard.hardware.cluster import Device
from steelyard.measure.cache import CostCache
from steelyard.measure.operators.benchmark import context_of
from steelyard.measure.operators.timer import Clock

_ROUNDS = 7
# On a CPU these take about 10 ms each; on a GPU they are large enough to fill it.
_MATMUL_SIZE = {"cpu": 768, "cuda": 8192}
_COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
_EVICTING_BYTES = 4 << 20


def with_measured_rates(
    device: Device, *, cache: CostCache | None = None, torch_device: torch.device | None = None
) -> Device:
    """Return ``device`` with rates measured now, or cached from an earlier measurement."""
    names = ("flops_per_second", "bytes_per_second", "call_seconds")
    context = context_of(device)
    rates = cache.read_rates(context) if cache else {}
    if not all(name in rates for name in names):
        rates = _measured(torch_device or torch.device("cpu"))
        if cache:
            # Another process may already have stored its figures.
            rates |= cache.read_rates(context)
            cache.write_rates(context, rates)
    return replace(
        device,
        flops_per_second=rates["flops_per_second"],
        bytes_per_second=rates["bytes_per_second"],
        call_seconds=rates["call_seconds"],
    )


def _measured(device: torch.device) -> dict[str, float]:
    with torch.no_grad():
        return {
            "flops_per_second": _flops_per_second(device),
            "bytes_per_second": _bytes_per_second(device),
            "call_seconds": _call_seconds(device),
        }


def matmul_seconds(device: torch.device, *, rounds: int = _ROUNDS) -> list[float]:
    """Return repeated times of one matrix product, for its speed and its variation."""
    size = _MATMUL_SIZE[device.type]
    x = torch.ones(size, size, dtype=torch.float32, device=device)
    clock = Clock(device)
    torch.mm(x, x)
    return [clock.seconds(lambda: torch.mm(x, x)) for _ in range(rounds)]


def _flops_per_second(device: torch.device) -> float:
    return 2 * _MATMUL_SIZE[device.type] ** 3 / median(matmul_seconds(device))


def _bytes_per_second(device: torch.device) -> float:
    """Return the copy rate; read and written bytes both count, as in a node's ``moved_bytes``."""
    nbytes = _COPY_BYTES[device.type]
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    clock = Clock(device)
    target.copy_(source)
    return 2 * nbytes / median(clock.seconds(lambda: target.copy_(source)) for _ in range(_ROUNDS))


def _call_seconds(device: torch.device) -> float:
    """Return the time of a trivial operator after other data has filled the caches, as in a
    step.
    """
    small = torch.ones(8, dtype=torch.float32, device=device)
    evicting = torch.ones(_EVICTING_BYTES // 4, dtype=torch.float32, device=device)
    clock = Clock(device)
    found = []
    for _ in range(3 * _ROUNDS):
        evicting.add_(1.0)
        found.append(clock.seconds(lambda: torch.add(small, small)))
    return median(found)
