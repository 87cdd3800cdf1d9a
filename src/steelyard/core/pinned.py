"""Slots in memory that ranks of one host share, for messages whose shapes a plan fixes.

How many there are of each kind of message, and what they hold: that is known before anything runs.
Not for carrying anything over: see exchange/pinned.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from steelyard.core.graph import Graph
from steelyard.core.schedule import AHEAD, Order, Work, source_of
from steelyard.core.stages import Stage

# The link of messages that go through such slots, among those of a machine's costs.
PINNED = "pinned"
# Each value begins on a cache line, each slot on a page.
_LINE, _PAGE = 64, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What ``stage`` reads of a stage on another rank, one message for each micro-batch.

    ``sizes`` are those of its values in bytes; ``count`` slots are enough for what is read there
    at one time, and for what is sent ahead, or for all that comes in a step (``holds_all``).
    """

    stage: int
    is_back: bool
    source: int
    target: int
    sizes: tuple[int, ...]
    count: int
    holds_all: bool

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each value begins in a slot."""
        found, end = [], 0
        for size in self.sizes:
            found.append(end)
            end += -(-size // _LINE) * _LINE
        return tuple(found)

    @property
    def slot_bytes(self) -> int:
        end = self.offsets[-1] + self.sizes[-1]
        return max(1, -(-end // _PAGE)) * _PAGE

    @property
    def nbytes(self) -> int:
        return self.count * self.slot_bytes


def edges_of(order: Order, stages: Sequence[Stage], graph: Graph) -> tuple[Edge, ...]:
    """In the order of stages, what is read forward before what is read back."""
    rank_of = order.rank_of
    found = []
    for stage in stages:
        for is_back, names in ((False, stage.receives), (True, stage.receives_back)):
            source = stage.index + (1 if is_back else -1)
            if not names or rank_of[source] == rank_of[stage.index]:
                continue
            at_once = max(_held(order, stage, graph, is_back=is_back))
            found.append(
                Edge(
                    stage=stage.index,
                    is_back=is_back,
                    source=rank_of[source],
                    target=rank_of[stage.index],
                    sizes=tuple(sum(t.nbytes for t in graph.by_name[n].outputs) for n in names),
                    count=min(order.num_micro_batches, at_once + AHEAD),
                    holds_all=order.num_micro_batches <= at_once + AHEAD,
                )
            )
    return tuple(found)


def _held(order: Order, stage: Stage, graph: Graph, *, is_back: bool) -> Iterator[int]:
    """How many messages are read, or stay to be read again, while each action works."""
    names = stage.receives_back if is_back else stage.receives
    own = {s for name in names for s in graph.storages_of(name)}
    stays = own & {s for name in stage.kept for s in graph.storages_of(name)}
    stays_between = own & {s for name in stage.kept_between for s in graph.storages_of(name)}
    here: set[int] = set()
    for action in order.ranks[order.rank_of[stage.index]]:
        if action.stage != stage.index:
            continue
        comes = source_of(action, order.rank_of) is not None
        if comes and (action.work is not Work.FORWARD) == is_back:
            here.add(action.micro_batch)
        yield len(here)
        stay = {
            Work.FORWARD: stays,
            Work.BACK_TO_INPUTS: stays_between,
        }.get(action.work)
        if not stay:
            here.discard(action.micro_batch)
