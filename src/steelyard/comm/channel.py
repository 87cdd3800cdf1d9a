"""The live process group of a mesh axis with its timers, for operators and checks.

Not for launching ranks.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from steelyard.comm.backend_bugs import refuse_hazards
from steelyard.comm.devices import CPU
from steelyard.comm.stopwatch import Stopwatch
from steelyard.errors import Mismatch
from steelyard.ir.program import Program
from steelyard.operators import operator_named

# How long to wait for a backend to release the tensors that it sent. If a core is free, this takes
# microseconds.
_PATIENCE_SECONDS = 0.1
_PAUSE_SECONDS = 2e-5


class Waiting(Stopwatch):
    """Waits for collectives and accumulates the time this takes. ``moved_bytes`` are bytes that
    went to other ranks without a network connection, such as through shared memory."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.moved_bytes = 0
        self._wait = operator_named("_c10d_functional.wait_tensor.default")

    def __call__(self, sent: torch.Tensor) -> torch.Tensor:
        with self.running():
            arrived: torch.Tensor = self._wait(sent)
            # gloo's thread signals completion before it releases the tensors and its own copies. On
            # a busy machine the step would otherwise go on while memory that its plan has freed is
            # still in use.
            deadline = time.perf_counter() + _PATIENCE_SECONDS
            while arrived._use_count() > 1 and time.perf_counter() < deadline:  # type: ignore[attr-defined]
                time.sleep(_PAUSE_SECONDS)
        return arrived


class CodecTimer(Stopwatch):
    """Accumulates the time spent on encoding and decoding gradients."""

    def timed(self, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any) -> torch.Tensor:
            with self.running():
                return call(*args)

        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A process group as the operators of one mesh axis use it.

    ``group`` is the name under which torch's collectives find the process group. ``calls`` replace
    those collectives, even if there is no process group. The tensors this rank sends are on its
    ``device``, and ``backend`` transports them.
    """

    group: str
    backend: str
    num_ranks: int
    rank: int
    waiting: Waiting = field(default_factory=Waiting)
    coding: CodecTimer = field(default_factory=CodecTimer)
    calls: Mapping[str, Callable[..., torch.Tensor]] = field(default_factory=dict)
    process_group: dist.ProcessGroup | None = None
    device: torch.device = CPU

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device = CPU) -> "Channel":
        backend: Any = group._get_backend(device)
        return cls(
            waiting=Waiting(device),
            coding=CodecTimer(device),
            device=device,
            group=group.group_name,
            backend=backend.name(),
            num_ranks=group.size(),
            rank=group.rank(),
            process_group=group,
        )


def check_channels(program: Program, channels: Mapping[str, Channel]) -> None:
    """Raise Mismatch if the live groups are not those that the program was made for, or cannot run
    it.
    """
    nodes = program.graph.by_name
    for exchange in program.exchanges:
        collective = nodes[program.instructions[exchange.issue].node].collective
        assert collective is not None
        if collective.is_transfer:
            continue
        channel = channels.get(collective.axis)
        num_ranks_of_channel = channel.num_ranks if channel is not None else "no"
        if num_ranks_of_channel != collective.num_ranks:
            raise Mismatch(
                f"the step exchanges data among {collective.num_ranks} ranks over the axis "
                f"{collective.axis!r}, but its group has {num_ranks_of_channel}",
                expected="a process group for each axis, of the size in the plan",
                remedy="start as many ranks as the plan was made for, or plan again",
            )
    backends = {axis: channel.backend for axis, channel in channels.items()}
    refuse_hazards(program, backends=backends)
