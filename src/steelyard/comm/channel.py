"""The live process group behind a mesh axis, as operators and checks name it.

Not for bringing ranks up.
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

# How long a backend may take to let go of what it sent; it does in microseconds where a core is
# free.
_PATIENCE_SECONDS = 0.1
_PAUSE_SECONDS = 2e-5


class Waiting(Stopwatch):
    """Waits for what was sent, and says how long that took in all; ``moved_bytes`` went to other
    ranks over no connection."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.moved_bytes = 0
        self._wait = operator_named("_c10d_functional.wait_tensor.default")

    def __call__(self, sent: torch.Tensor) -> torch.Tensor:
        with self.running():
            arrived: torch.Tensor = self._wait(sent)
            # gloo's thread says that it is done and only then lets go of the tensors and of its own
            # copies: on a busy machine the step would go on beside memory that its plan has freed.
            until = time.perf_counter() + _PATIENCE_SECONDS
            while arrived._use_count() > 1 and time.perf_counter() < until:  # type: ignore[attr-defined]
                time.sleep(_PAUSE_SECONDS)
        return arrived


class CodecTimer(Stopwatch):
    """Says how long what writes gradients down and reads them back took in all."""

    def timed(self, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any) -> torch.Tensor:
            with self.running():
                return call(*args)

        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """``group`` is the name under which torch's collectives find the process group; ``calls`` stand
    in place of them where there is none. What this rank sends lies on its ``device``, from which
    ``backend`` carries it."""

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
    """That the live groups are those the program was made for, and can carry it out."""
    nodes = program.graph.by_name
    for exchange in program.exchanges:
        collective = nodes[program.instructions[exchange.issue].node].collective
        assert collective is not None
        if collective.is_far:
            continue
        channel = channels.get(collective.axis)
        ranks = channel.num_ranks if channel is not None else "no"
        if ranks != collective.num_ranks:
            raise Mismatch(
                f"the step exchanges data among {collective.num_ranks} ranks over the axis "
                f"{collective.axis!r}, where there are {ranks}",
                expected="a process group for each axis, of the size that was planned for",
                remedy="start as many ranks as the plan was made for, or plan again",
            )
    backends = {axis: channel.backend for axis, channel in channels.items()}
    refuse_hazards(program, backends=backends)
