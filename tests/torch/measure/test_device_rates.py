from pathlib import Path

import torch

from steelyard.hardware.cluster import Device
from steelyard.measure.cache import CostCache
from steelyard.measure.device_rates import with_measured_rates
from steelyard.measure.operators.benchmark import context_of

DEVICE = Device(kind="d", flops_per_second=1.0, bytes_per_second=1.0, memory_bytes=7, threads=3)


def test_only_the_rates_change() -> None:
    found = with_measured_rates(DEVICE)
    assert (found.kind, found.memory_bytes, found.threads) == ("d", 7, 3)
    assert found.flops_per_second > 1e6
    assert found.bytes_per_second > 1e6
    assert 0 < found.call_seconds < 1


def test_known_rates_are_taken(tmp_path: Path) -> None:
    cache = CostCache(tmp_path / "costs.sqlite")
    rates = {"flops_per_second": 11.0, "bytes_per_second": 12.0, "call_seconds": 13.0}
    cache.write_rates(context_of(DEVICE), rates)
    found = with_measured_rates(DEVICE, cache=cache)
    assert (found.flops_per_second, found.bytes_per_second, found.call_seconds) == (11, 12, 13)


def test_rates_belong_to_a_number_of_threads(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    before = context_of(DEVICE)
    try:
        torch.set_num_threads(threads + 1)
        assert context_of(DEVICE) != before
    finally:
        torch.set_num_threads(threads)
