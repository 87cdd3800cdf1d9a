"""What other ranks of a pipeline send to this one: room made ahead, told apart by number.

Not for what is sent, nor for who works when: see pipeline.py.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from steelyard.core.graph import Graph
from steelyard.core.schedule import AHEAD, Action, Work, source_of
from steelyard.core.stages import Stage
from steelyard.exchange.receipts import Receipts


class Numbers:
    """Each message of a step has its own, the same on all ranks: they may be asked for and sent in
    any order."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._num_stages = len(stages)
        self._width = max(max(len(s.receives), len(s.receives_back)) for s in stages)

    def of(self, stage: int, micro_batch: int, value: int, *, is_back: bool) -> int:
        """Of what this stage reads; ``value`` is its place among them."""
        message = (micro_batch * self._num_stages + stage) * 2 + is_back
        return message * self._width + value


class Arrivals:
    """Of one rank in one step; ``rank_at`` says the number of a stage's rank among all."""

    def __init__(
        self,
        actions: Sequence[Action],
        stages: Sequence[Stage],
        graph: Graph,
        *,
        rank_of: Mapping[int, int],
        rank_at: Callable[[int], int],
        group: dist.ProcessGroup,
        receipts: Receipts,
    ) -> None:
        self._actions, self._stages, self._graph = actions, stages, graph
        self._rank_of, self._rank_at, self._group = rank_of, rank_at, group
        self._numbers = Numbers(stages)
        self._receipts = receipts
        self._done = self._asked = 0
        self._coming: dict[Action, list[tuple[str, torch.Tensor, dist.Work]]] = {}

    def of(self, action: Action) -> dict[str, torch.Tensor]:
        """What this action, the next, is sent, when it has come."""
        assert action == self._actions[self._done], f"{action} is not what was to be done next"
        self._receipts.at_once()
        while self._asked < min(len(self._actions), self._done + 1 + AHEAD):
            self._ask_for(self._actions[self._asked])
            self._asked += 1
        self._done += 1
        self._receipts.at_once()  # of what comes while this rank works
        arrived = {}
        for name, value, work in self._coming.pop(action, ()):
            work.wait()
            arrived[name] = value
        return arrived

    def _ask_for(self, action: Action) -> None:
        source = source_of(action, self._rank_of)
        if source is None:
            return
        stage, is_back = self._stages[action.stage], action.work is not Work.FORWARD
        names = stage.receives_back if is_back else stage.receives
        coming = self._coming[action] = []
        for place, name in enumerate(names):
            (planned,) = self._graph.by_name[name].outputs
            value = torch.empty(planned.shape, dtype=getattr(torch, planned.dtype))
            number = self._numbers.of(stage.index, action.micro_batch, place, is_back=is_back)
            work = dist.irecv(value, self._rank_at(source), self._group, tag=number)
            assert work is not None, "this rank is one of the group"
            coming.append((name, value, work))
