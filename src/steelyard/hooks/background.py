"""Work that a backward pass hands over and goes on: to a thread, or to a stream of its device.

Not for what is done there: see ddp.py.
"""

from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch

from steelyard.errors import RunFailed, SteelyardError

Came = torch.futures.Future[torch.Tensor]


class BackgroundWork(Protocol):
    def do(self, work: Callable[[], None], buffer: torch.Tensor) -> Came:
        """One after another, in the order of calls; ``buffer`` comes when its work is done."""
        ...


class OnThread:
    """For gradients of a CPU."""

    def __init__(self) -> None:
        self._given: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Not one that the process would wait for at its end: a rank that is gone sends nothing.
        Thread(target=_at_work, args=(self._given,), name="steelyard-hooks", daemon=True).start()

    def do(self, work: Callable[[], None], buffer: torch.Tensor) -> Came:
        done: torch.futures.Future[Any] = torch.futures.Future()

        def run() -> None:
            try:
                work()
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 - raised where the backward pass waits for it
                done.set_result(error)

        def given(done: torch.futures.Future[Any]) -> torch.Tensor:
            if (error := done.value()) is not None:
                raise _failed(error)
            return buffer

        # Not set_exception: torch would say that it is no tensor.
        came = done.then(given)
        self._given.put(run)
        return came


class OnStream:
    """For gradients of a GPU, whose host only says what is to be done: the stream waits for what
    the backward pass has done so far, and whoever waits for the buffer waits for the stream."""

    def do(self, work: Callable[[], None], buffer: torch.Tensor) -> Came:
        stream = _stream_of(buffer.device)
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        done: torch.futures.Future[Any] = torch.futures.Future(devices=[buffer.device])
        with torch.cuda.stream(stream):
            try:
                work()
            except Exception as error:
                raise _failed(error) from error
            done.set_result(buffer)
        return done


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _at_work(given: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        given.get()()


def _failed(error: Exception) -> SteelyardError:
    if isinstance(error, SteelyardError):
        return error  # it says itself what to do
    return RunFailed(
        f"gradients did not come from all ranks: {str(error)[:200]}",
        expected="every rank there until the backward pass is over",
        remedy="look at the rank that ended first; go on from a checkpoint",
    )
