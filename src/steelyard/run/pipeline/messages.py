"""Messages between the ranks of a pipeline: through gloo, or through shared memory.

Not for the values or the schedule: see driver.py.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from steelyard.comm.devices import CPU
from steelyard.comm.gloo.thread_scheduling import give_way
from steelyard.comm.shared_memory.slots import Like
from steelyard.comm.shared_memory.transport import shared_memory_transport
from steelyard.comm.tcp_quickack import QuickAcks
from steelyard.ir.graph import Graph
from steelyard.ir.message_slots import edges_of
from steelyard.ir.pipeline_schedule import AHEAD, Action, ActionKind, source_of
from steelyard.ir.pipeline_stages import PipelineStage
from steelyard.ir.program import Pipeline
from steelyard.run.fast_bindings import OutputBuffer

Values = Mapping[str, torch.Tensor]


class Messages(Protocol):
    """The sends and receives of one rank. ``held_bytes`` is the memory reserved for them between
    steps; ``moved_bytes`` counts the bytes sent so far without a network connection."""

    @property
    def held_bytes(self) -> int: ...

    @property
    def moved_bytes(self) -> int: ...

    def begin(self) -> None:
        """Start a step."""
        ...

    def receive(self, action: Action) -> dict[str, torch.Tensor]:
        """Wait for the inputs of this action, which must be the next one, and return them."""
        ...

    def send(self, to: int, micro_batch: int, values: Values, *, is_back: bool) -> list[dist.P2POp]:
        """Send values to stage ``to``; return the operations that torch has to issue itself."""
        ...

    def output_buffers(
        self, to: int, names: Sequence[str], *, is_back: bool
    ) -> Mapping[str, OutputBuffer]:
        """Return buffers, by name, in which values for stage ``to`` can be computed in place."""
        ...

    def end(self) -> None:
        """End the step; everything has been sent."""
        ...


class MessageTags:
    """Message tags for one step, one per message and equal on all ranks, so that messages may be
    sent and received in any order.
    """

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._num_stages = len(stages)
        self._width = max(max(len(s.receives), len(s.receives_back)) for s in stages)

    def tag(self, stage: int, micro_batch: int, value: int, *, is_back: bool) -> int:
        """Return the tag of an input of ``stage``; ``value`` is its index among the stage's
        inputs."""
        message = (micro_batch * self._num_stages + stage) * 2 + is_back
        return message * self._width + value


class _Endpoint:
    """The pipeline data that both transports need."""

    def __init__(self, pipeline: Pipeline, group: dist.ProcessGroup, device: torch.device) -> None:
        self._stages, self._graph = pipeline.stages.stages, pipeline.stages.graph
        self._group, self._rank_of, self._device = group, pipeline.order.rank_of, device
        self._actions = pipeline.order.ranks[dist.get_rank(group)]

    def _inputs_of(self, action: Action) -> tuple[bool, tuple[str, ...]]:
        """Return True if the action is a backward one, and the names of its inputs from other
        ranks.
        """
        is_back = action.work is not ActionKind.FORWARD
        if source_of(action, self._rank_of) is None:
            return is_back, ()
        stage = self._stages[action.stage]
        return is_back, stage.receives_back if is_back else stage.receives


class ByGloo(_Endpoint):
    """Point-to-point messages over gloo; receives are posted ahead and matched by tag.

    ``rank_at`` maps a stage to the global number of its rank. GPU tensors are sent through host
    memory: gloo cannot send GPU memory, and NCCL would require all ranks to send and receive in the
    same order.
    """

    held_bytes = moved_bytes = 0

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        group: dist.ProcessGroup,
        rank_at: Callable[[int], int],
        device: torch.device,
    ) -> None:
        super().__init__(pipeline, group, device)
        self._rank_at = rank_at
        self._tags = MessageTags(self._stages)
        self._quick_acks: QuickAcks | None = None
        self._done = self._posted = 0
        self._pending: dict[Action, list[tuple[str, torch.Tensor, dist.Work]]] = {}

    def begin(self) -> None:
        self._done = self._posted = 0
        self._pending.clear()

    def receive(self, action: Action) -> dict[str, torch.Tensor]:
        assert action == self._actions[self._done], f"{action} is not the next scheduled action"
        self._ack_quickly()
        while self._posted < min(len(self._actions), self._done + 1 + AHEAD):
            self._post_receives(self._actions[self._posted])
            self._posted += 1
        self._done += 1
        self._ack_quickly()  # also for data that arrives while this rank computes
        arrived = {}
        for name, value, work in self._pending.pop(action, ()):
            work.wait()
            arrived[name] = value.to(self._device)
        return arrived

    def send(self, to: int, micro_batch: int, values: Values, *, is_back: bool) -> list[dist.P2POp]:
        give_way()
        return [
            dist.P2POp(
                dist.isend, value.contiguous().cpu(), self._rank_at(to), self._group,
                tag=self._tags.tag(to, micro_batch, place, is_back=is_back),
            )
            for place, value in enumerate(values.values())
        ]  # fmt: skip

    def output_buffers(
        self,
        to: int,  # noqa: ARG002
        names: Sequence[str],  # noqa: ARG002
        *,
        is_back: bool,  # noqa: ARG002
    ) -> Mapping[str, OutputBuffer]:
        return {}  # gloo sends from any memory

    def end(self) -> None:
        if self._quick_acks is None:  # connections are opened on first use
            self._quick_acks = QuickAcks()

    def _ack_quickly(self) -> None:
        if self._quick_acks is not None:
            self._quick_acks.at_once()

    def _post_receives(self, action: Action) -> None:
        is_back, names = self._inputs_of(action)
        if not names:
            return
        source = source_of(action, self._rank_of)
        assert source is not None
        pending = self._pending[action] = []
        for place, name in enumerate(names):
            shape, dtype = _like(self._graph, name)
            value = torch.empty(shape, dtype=dtype, device=CPU)
            tag = self._tags.tag(action.stage, action.micro_batch, place, is_back=is_back)
            work = dist.irecv(value, self._rank_at(source), self._group, tag=tag)
            assert work is not None, "this rank is one of the group"
            pending.append((name, value, work))


class ThroughSlots(_Endpoint):
    """Messages through memory that the ranks share, in slots that are allocated before the first
    step.
    """

    def __init__(
        self, pipeline: Pipeline, *, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__(pipeline, group, device)
        edges = edges_of(pipeline.order, self._stages, self._graph)
        self._edges = {(edge.stage, edge.is_back): index for index, edge in enumerate(edges)}
        self._pinned = shared_memory_transport(edges, group=group, device=device)
        self._micro_batch = 0
        self.held_bytes = self._pinned.held_bytes

    @property
    def moved_bytes(self) -> int:
        return self._pinned.moved_bytes

    def begin(self) -> None:
        self._pinned.begin()

    def receive(self, action: Action) -> dict[str, torch.Tensor]:
        self._micro_batch = action.micro_batch
        is_back, names = self._inputs_of(action)
        if not names:
            return {}
        edge, forms = self._edges[action.stage, is_back], [_like(self._graph, n) for n in names]
        return dict(zip(names, self._pinned.receive(edge, action.micro_batch, forms), strict=True))

    def send(self, to: int, micro_batch: int, values: Values, *, is_back: bool) -> list[dist.P2POp]:
        if values:
            self._pinned.send(self._edges[to, is_back], micro_batch, [*values.values()])
        return []

    def output_buffers(
        self, to: int, names: Sequence[str], *, is_back: bool
    ) -> Mapping[str, OutputBuffer]:
        edge = self._edges.get((to, is_back))
        if edge is None:  # the other stage is on this rank
            return {}
        return {
            name: partial(self._slot, edge, position, _like(self._graph, name))
            for position, name in enumerate(names)
        }

    def _slot(self, edge: int, position: int, like: Like) -> torch.Tensor | None:
        """Return the slot for an output of the current micro-batch."""
        return self._pinned.place(edge, self._micro_batch, position, like)

    def end(self) -> None:
        self._pinned.settle()


def _like(graph: Graph, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    (planned,) = graph.by_name[name].outputs
    return planned.shape, getattr(torch, planned.dtype)
