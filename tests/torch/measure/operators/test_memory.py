import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.measure.operators.memory import Metered, meter, meter_once, replay, trace

MIB = 1 << 20


def floats(mib: int) -> torch.Tensor:
    return torch.zeros(mib * MIB // 4)


def test_a_temporary_counts_in_the_peak_and_not_in_the_remaining_bytes() -> None:
    def call() -> torch.Tensor:
        temporary = floats(2)
        return torch.cat([temporary, temporary])

    assert meter(call) == Metered(peak_bytes=6 * MIB, left_bytes=4 * MIB)


def test_allocations_of_the_first_call_only_are_not_measured() -> None:
    kept: dict[str, torch.Tensor] = {}

    def call() -> torch.Tensor:
        if not kept:
            kept["packed"] = floats(8)
        return floats(1)

    assert meter(call).peak_bytes == MIB
    kept.clear()
    assert meter(call, warmups=0).peak_bytes == 9 * MIB


def test_an_unclean_level_is_reported() -> None:
    kept = []

    def call() -> None:
        kept.clear()
        kept.append(floats(3))

    metered = meter(call)
    assert not metered.is_clean
    assert metered.freed_bytes == 3 * MIB
    assert metered.peak_bytes == metered.left_bytes == 3 * MIB
    kept.clear()
    assert meter(call, warmups=0).is_clean


def test_errors_inside_the_meter_are_raised() -> None:
    def call() -> None:
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        meter(call)
    assert meter_once(lambda: floats(1)).peak_bytes == MIB


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1000)), max_size=40))
def test_replaying_allocations_gives_the_peak(steps: list[tuple[int, int]]) -> None:
    """Each address is allocated if it is free, and freed otherwise; half of the blocks existed
    before."""
    alive = dict.fromkeys((0, 1, 2), 64)
    before, events, levels = dict(alive), [], [0]
    freed = 0
    for address, nbytes in steps:
        if address in alive:
            size = alive.pop(address)
            events.append((address, -size))
            if before.pop(address, None):
                freed += size
        else:
            alive[address] = nbytes
            events.append((address, nbytes))
        levels.append(sum(n for a, n in alive.items() if a not in before))
    expected = Metered(peak_bytes=max(levels), left_bytes=levels[-1], freed_bytes=freed)
    assert replay(events) == expected


def test_a_trace_has_every_level_in_the_order_of_time() -> None:
    def call() -> None:
        first = floats(2)
        second = floats(1)
        del first
        del second

    seconds, levels = zip(*trace(call), strict=True)
    assert levels == (2 * MIB, 3 * MIB, MIB, 0)
    assert seconds[0] == 0
    assert list(seconds) == sorted(seconds)
    assert trace(lambda: None) == []


def test_live_allocations_never_overlap() -> None:
    """An unobserved thread may have freed the earlier block."""
    events = [(1, 100), (1, 60), (2, 30), (1, -60), (2, -30)]
    assert replay(events) == Metered(peak_bytes=100, left_bytes=0, freed_bytes=0)


@pytest.mark.slow
def test_metering_prints_nothing() -> None:
    probe = (
        "import torch\n"
        "from steelyard.measure.operators.memory import meter\n"
        "print(meter(lambda: torch.zeros(1024)).peak_bytes)"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("4096\n", "")


@pytest.mark.gpu
def test_on_cuda_the_allocator_is_read() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda")

    def call() -> torch.Tensor:
        temporary = torch.zeros(2 * MIB // 4, device=device)
        return torch.cat([temporary, temporary])

    assert meter(call, device=device) == Metered(peak_bytes=6 * MIB, left_bytes=4 * MIB)
