"""The conditions of a measurement on this machine: device, threads of a rank, background load.

Not for measuring: see operators/benchmark.py for operators and step_calibration.py for whole steps.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from steelyard.errors import BadInput
from steelyard.hardware.cluster import Device
from steelyard.measure.cache import CostCache
from steelyard.measure.links.background_load import BackgroundLoad
from steelyard.measure.operators.benchmark import context_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuringConditions:
    """The conditions of all measurements for one plan, and the cache that keeps their results.

    ``threads`` is None if a rank keeps the user's number of threads. ``host_speed`` is the speed of
    this host relative to the fastest one: times measured here are scaled by it.
    """

    device: Device
    torch_device: torch.device
    cache: CostCache
    load: BackgroundLoad
    threads: int | None
    host_speed: float

    @contextlib.contextmanager
    def threads_of_rank(self) -> Iterator[None]:
        """Run operators within the context with as many threads as a rank has."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def context(self) -> str:
        """Return the cache context of a measurement that is made now."""
        return context_of(self.device, sharers=self.load.num_ranks, hosts=self.load.hosts)


def profiler_error(what: str) -> BadInput:
    """Return the error that ``what`` cannot be measured, because a profiler is active."""
    return BadInput(
        f"a profiler is active, but this plan needs {what} to be measured: measuring would take "
        "the profiler's events, and the profiler would slow down the measurement",
        expected="no torch.profiler that records or warms up while a step is planned",
        remedy="call steelyard.plan() before the profiler is started",
    )
