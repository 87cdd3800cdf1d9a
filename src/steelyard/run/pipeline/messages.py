"""What the ranks of a pipeline send each other: through gloo, or through memory that they share.

Not for what is sent, nor for who works when: see driver.py.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from steelyard.comm.devices import CPU
from steelyard.comm.gloo.thread_scheduling import give_way
from steelyard.comm.shared_memory.slots import Like
from steelyard.comm.shared_memory.transport import pinned_among
from steelyard.comm.tcp_quickack import QuickAcks
from steelyard.ir.graph import Graph
from steelyard.ir.message_slots import edges_of
from steelyard.ir.pipeline_schedule import AHEAD, Action, ActionKind, source_of
from steelyard.ir.pipeline_stages import PipelineStage
from steelyard.ir.program import Pipeline
from steelyard.run.fast_bindings import Room

Values = Mapping[str, torch.Tensor]


class Messages(Protocol):
    """Of one rank. ``held_bytes`` is what is there for them between steps too, ``moved_bytes``
    what has gone in all, and over no connection."""

    @property
    def held_bytes(self) -> int: ...

    @property
    def moved_bytes(self) -> int: ...

    def begin(self) -> None:
        """A step."""
        ...

    def of(self, action: Action) -> dict[str, torch.Tensor]:
        """What this action, the next, is sent, when it has come."""
        ...

    def sending(
        self, to: int, micro_batch: int, values: Values, *, is_back: bool
    ) -> list[dist.P2POp]:
        """To stage ``to``; what torch is to send itself."""
        ...

    def rooms(self, to: int, names: Sequence[str], *, is_back: bool) -> Mapping[str, Room]:
        """Where what is sent to stage ``to`` may be made, by name."""
        ...

    def end(self) -> None:
        """All that was sent is on its way, and the step is over."""
        ...


class MessageTags:
    """Each message of a step has its own, the same on all ranks: they may be asked for and sent in
    any order."""

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._num_stages = len(stages)
        self._width = max(max(len(s.receives), len(s.receives_back)) for s in stages)

    def of(self, stage: int, micro_batch: int, value: int, *, is_back: bool) -> int:
        """Of what this stage reads; ``value`` is its place among them."""
        message = (micro_batch * self._num_stages + stage) * 2 + is_back
        return message * self._width + value


class _OfRank:
    """What both ways ask of a pipeline."""

    def __init__(self, pipeline: Pipeline, group: dist.ProcessGroup, device: torch.device) -> None:
        self._stages, self._graph = pipeline.stages.stages, pipeline.stages.graph
        self._group, self._rank_of, self._device = group, pipeline.order.rank_of, device
        self._actions = pipeline.order.ranks[dist.get_rank(group)]

    def _read_by(self, action: Action) -> tuple[bool, tuple[str, ...]]:
        """Whether it is read on the way back, and what of another rank it is; nothing of none."""
        is_back = action.work is not ActionKind.FORWARD
        if source_of(action, self._rank_of) is None:
            return is_back, ()
        stage = self._stages[action.stage]
        return is_back, stage.receives_back if is_back else stage.receives


class ByGloo(_OfRank):
    """Room is made ahead, and messages are told apart by number; ``rank_at`` says the number of a
    stage's rank among all. What lies on a GPU goes by way of its host: gloo sends nothing else, and
    NCCL would have all ranks send and read in one order."""

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
        self._numbers = MessageTags(self._stages)
        self._receipts: QuickAcks | None = None
        self._done = self._asked = 0
        self._coming: dict[Action, list[tuple[str, torch.Tensor, dist.Work]]] = {}

    def begin(self) -> None:
        self._done = self._asked = 0
        self._coming.clear()

    def of(self, action: Action) -> dict[str, torch.Tensor]:
        assert action == self._actions[self._done], f"{action} is not what was to be done next"
        self._at_once()
        while self._asked < min(len(self._actions), self._done + 1 + AHEAD):
            self._ask_for(self._actions[self._asked])
            self._asked += 1
        self._done += 1
        self._at_once()  # of what comes while this rank works
        arrived = {}
        for name, value, work in self._coming.pop(action, ()):
            work.wait()
            arrived[name] = value.to(self._device)
        return arrived

    def sending(
        self, to: int, micro_batch: int, values: Values, *, is_back: bool
    ) -> list[dist.P2POp]:
        give_way()
        return [
            dist.P2POp(
                dist.isend, value.contiguous().cpu(), self._rank_at(to), self._group,
                tag=self._numbers.of(to, micro_batch, place, is_back=is_back),
            )
            for place, value in enumerate(values.values())
        ]  # fmt: skip

    def rooms(self, to: int, names: Sequence[str], *, is_back: bool) -> Mapping[str, Room]:  # noqa: ARG002
        return {}  # gloo sends from wherever it is

    def end(self) -> None:
        if self._receipts is None:  # connections come about when they are first used
            self._receipts = QuickAcks()

    def _at_once(self) -> None:
        if self._receipts is not None:
            self._receipts.at_once()

    def _ask_for(self, action: Action) -> None:
        is_back, names = self._read_by(action)
        if not names:
            return
        source = source_of(action, self._rank_of)
        assert source is not None
        coming = self._coming[action] = []
        for place, name in enumerate(names):
            shape, dtype = _like(self._graph, name)
            value = torch.empty(shape, dtype=dtype, device=CPU)
            number = self._numbers.of(action.stage, action.micro_batch, place, is_back=is_back)
            work = dist.irecv(value, self._rank_at(source), self._group, tag=number)
            assert work is not None, "this rank is one of the group"
            coming.append((name, value, work))


class ThroughSlots(_OfRank):
    """In memory that its ranks share, at places that are made for them before the first step."""

    def __init__(
        self, pipeline: Pipeline, *, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__(pipeline, group, device)
        edges = edges_of(pipeline.order, self._stages, self._graph)
        self._edges = {(edge.stage, edge.is_back): index for index, edge in enumerate(edges)}
        self._pinned = pinned_among(edges, group=group, device=device)
        self._at_work = 0
        self.held_bytes = self._pinned.held_bytes

    @property
    def moved_bytes(self) -> int:
        return self._pinned.moved_bytes

    def begin(self) -> None:
        self._pinned.begin()

    def of(self, action: Action) -> dict[str, torch.Tensor]:
        self._at_work = action.micro_batch
        is_back, names = self._read_by(action)
        if not names:
            return {}
        edge, likes = self._edges[action.stage, is_back], [_like(self._graph, n) for n in names]
        return dict(zip(names, self._pinned.receive(edge, action.micro_batch, likes), strict=True))

    def sending(
        self, to: int, micro_batch: int, values: Values, *, is_back: bool
    ) -> list[dist.P2POp]:
        if values:
            self._pinned.send(self._edges[to, is_back], micro_batch, [*values.values()])
        return []

    def rooms(self, to: int, names: Sequence[str], *, is_back: bool) -> Mapping[str, Room]:
        edge = self._edges.get((to, is_back))
        if edge is None:  # on the same rank
            return {}
        return {
            name: partial(self._place, edge, position, _like(self._graph, name))
            for position, name in enumerate(names)
        }

    def _place(self, edge: int, position: int, like: Like) -> torch.Tensor | None:
        """For what the action at work makes."""
        return self._pinned.place(edge, self._at_work, position, like)

    def end(self) -> None:
        self._pinned.settle()


def _like(graph: Graph, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    (planned,) = graph.by_name[name].outputs
    return planned.shape, getattr(torch, planned.dtype)
