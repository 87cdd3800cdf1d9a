"""GPU communication without a GPU: the backend for GPU tensors, the time that counts as waiting,
and groups of ranks that cannot use GPU memory."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from steelyard import _torch
from steelyard.api.rank_context import RankContext
from steelyard.capture.tracing.to_ir import symbol_of
from steelyard.comm.backends import backend_for
from steelyard.comm.stopwatch import Stopwatch
from steelyard.errors import BadInput
from steelyard.ir.graph import Symbol
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.measure.device_memory import check_is_own
from steelyard.planner.multi_host import keep_to_own_gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_nccl_is_used_if_each_rank_has_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert backend_for(GPU, ranks=4) == "cpu:gloo,cuda:nccl"
    assert backend_for(GPU, ranks=5) == "gloo"
    assert backend_for(CPU, ranks=4) == "gloo"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert backend_for(GPU, ranks=4) == "gloo"


@pytest.mark.parametrize("known", ["cuda:nccl", "cpu:gloo"])
def test_a_group_without_a_suitable_backend_is_refused(known: str) -> None:
    with mock.patch("steelyard.api.rank_context.dist") as groups:
        groups.group.WORLD.size.return_value = 2
        groups.get_backend_config.return_value = known
        said = f"has the backends {known}, but the model is on cuda:1"
        with pytest.raises(BadInput, match=said) as refused:
            RankContext.of(ParallelLayout(data=2), GPU)
    assert 'init_process_group("cpu:gloo,cuda:nccl")' in str(refused.value)
    assert len(str(refused.value).splitlines()) == 3


def test_a_model_is_on_the_gpu_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_is_own(torch.device("cuda", 0))
    check_is_own(CPU)
    with pytest.raises(BadInput, match="is on cuda:1, but the current GPU is 0") as refused:
        check_is_own(GPU)
    assert "torch.cuda.set_device(1)" in str(refused.value)


def test_a_rank_computes_on_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(_torch, "when_cuda_begins", lambda call: call())
    for name, value in {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for count in (1, 4, 8):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        keep_to_own_gpu()
    assert chosen == [1, 5]


def test_a_gpu_that_is_the_process_own_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert symbol_of(GPU) == Symbol("torch.device('cuda')")
    assert symbol_of(torch.device("cuda", 0)) == Symbol("torch.device('cuda:0')")
    assert symbol_of(CPU) == Symbol("torch.device('cpu')")


def test_a_processor_waits_by_the_clock() -> None:
    watch = Stopwatch()
    begin = time.perf_counter()
    for _ in range(2):
        with watch.running():
            time.sleep(0.01)
    assert 0.02 <= watch.seconds <= time.perf_counter() - begin


def test_computation_during_a_wait_is_not_counted_as_waiting() -> None:
    watch, begin = Stopwatch(), time.perf_counter()
    with watch.running():
        time.sleep(0.01)
        with watch.stopped():
            time.sleep(0.05)
    assert 0.01 <= watch.seconds <= time.perf_counter() - begin - 0.05


def test_a_step_that_fails_leaves_no_negative_waiting() -> None:
    watch = Stopwatch()

    def fail() -> None:
        with watch.running(), watch.stopped():
            time.sleep(0.01)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert 0 <= watch.seconds < 0.01


class _Event:
    """An event of a GPU that does one operation per second."""

    told = over = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0

    def record(self, stream: Any) -> None:
        assert stream == "stream of cuda:1"
        _Event.told += 1
        self.at = _Event.told

    def query(self) -> bool:
        return self.at <= _Event.over

    def elapsed_time(self, end: _Event) -> float:
        return 1000.0 * (end.at - self.at)


def test_gpu_times_are_read_from_finished_events_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    watch, seen = Stopwatch(GPU), []
    for _ in range(3):
        with watch.running():
            pass
    for over in (0, 2, 3, 6):
        _Event.over = over
        seen.append(watch.seconds)
    assert seen == [0.0, 1.0, 1.0, 3.0]


def test_a_gpu_computes_while_its_watch_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    _Event.told = _Event.over = 0
    watch = Stopwatch(GPU)
    with watch.running():  # from 1 to 6
        for _ in range(2):
            with watch.stopped():  # from 2 to 3, and from 4 to 5
                pass
    _Event.over = 5
    assert watch.seconds == 0.0, "of what goes on nothing is taken away"
    _Event.over = 6
    assert watch.seconds == 3.0
