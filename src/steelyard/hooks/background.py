"""Background work of a backward pass: on a thread for CPU tensors, on a stream for CUDA tensors.

Not for the work itself: see ddp.py.
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
        """Run ``work`` after all earlier work; the future of ``buffer`` completes when it is
        done."""
        ...


class OnThread:
    """Runs work for CPU gradients on one thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # A daemon thread, because otherwise the process would not exit while a transfer to a dead
        # rank hangs.
        Thread(target=_run_all, args=(self._queue,), name="steelyard-hooks", daemon=True).start()

    def do(self, work: Callable[[], None], buffer: torch.Tensor) -> Came:
        done: torch.futures.Future[Any] = torch.futures.Future()

        def run() -> None:
            try:
                work()
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 - raised where the backward pass waits for it
                done.set_result(error)

        def result(done: torch.futures.Future[Any]) -> torch.Tensor:
            if (error := done.value()) is not None:
                raise _failed(error)
            return buffer

        # Do not use set_exception: torch would complain that its result is not a tensor.
        future = done.then(result)
        self._queue.put(run)
        return future


class OnStream:
    """Runs work for CUDA gradients on a stream of its own. The stream first waits for what the
    backward pass has launched, and whoever uses the buffer waits for the stream.
    """

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


def _run_all(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        queue.get()()


def _failed(error: Exception) -> SteelyardError:
    if isinstance(error, SteelyardError):
        return error  # already has a remedy
    return RunFailed(
        f"gradients of some ranks did not arrive: {str(error)[:200]}",
        expected="every rank to complete the backward pass",
        remedy="read the output of the rank that ended first, and resume from a checkpoint",
    )
