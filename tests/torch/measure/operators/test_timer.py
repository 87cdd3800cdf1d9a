import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.measure.operators.timer import Clock, spread


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=30))
def test_spread_is_the_median_within_the_samples(samples: list[float]) -> None:
    found = spread(samples)
    assert found.value == pytest.approx(statistics.median(samples))
    assert min(samples) <= found.low <= found.value <= found.high <= max(samples)


def test_one_sample_out_of_ten_does_not_widen_it() -> None:
    assert spread([1.0] * 9 + [50.0]).high == 1.0


def test_each_timing_is_one_call() -> None:
    calls: list[int] = []
    clock = Clock(torch.device("cpu"))
    assert clock.seconds(lambda: calls.append(1)) > 0
    assert calls == [1]


@pytest.mark.gpu
def test_on_cuda_the_device_is_timed() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    x = torch.zeros(1 << 20, device="cuda")
    assert Clock(torch.device("cuda")).seconds(lambda: x + 1) > 0
