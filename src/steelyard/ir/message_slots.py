"""Slots in memory that ranks of one host share, for messages whose shapes a plan fixes.

How many there are of each kind of message, and what they hold: that is known before anything runs,
of what stages hand on and of what ranks exchange.
Not for carrying anything over: see comm/shared_memory/same_host.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from steelyard.ir.collective import Collective, Exchange
from steelyard.ir.graph import Graph
from steelyard.ir.pipeline_schedule import AHEAD, ActionKind, Order, source_of
from steelyard.ir.pipeline_stages import PipelineStage

# The link of messages that go through such slots, among those of a machine's costs.
PINNED = "pinned"
# Each value begins on a cache line, each slot on a page.
_LINE, _PAGE = 64, 4096
# By so many bytes one of several parts of a tensor may be larger than their mean.
_ODD = 16
# Nobody hands on the sum after the next before all have read this one.
_SUMS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSpec:
    """What one rank reads of another, message for message.

    ``sizes`` are the most bytes of each of its values; ``count`` slots are enough for what is read
    there at one time, and for what is sent ahead, or for all that comes in a step (``holds_all``).
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSlotSpec(SlotSpec):
    """What ``stage`` reads of a stage on another rank, one message for each micro-batch."""

    stage: int
    is_back: bool


def edges_of(
    order: Order, stages: Sequence[PipelineStage], graph: Graph
) -> tuple[StageSlotSpec, ...]:
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
                StageSlotSpec(
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


def evenly_held_bytes(edges: Sequence[SlotSpec]) -> int:
    """On each rank, where all make as much room as the one that reads most."""
    held: dict[int, int] = {}
    for edge in edges:
        held[edge.target] = held.get(edge.target, 0) + edge.nbytes
    return max(held.values(), default=0)


def _held(order: Order, stage: PipelineStage, graph: Graph, *, is_back: bool) -> Iterator[int]:
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
        if comes and (action.work is not ActionKind.FORWARD) == is_back:
            here.add(action.micro_batch)
        yield len(here)
        stay = {
            ActionKind.FORWARD: stays,
            ActionKind.BACK_TO_INPUTS: stays_between,
        }.get(action.work)
        if not stay:
            here.discard(action.micro_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSlots:
    """What ranks of an axis write to one another in exchanges: at most ``part_bytes`` each to each
    as its part of what it sends, of which ``count`` are held at one time; and ``sum_bytes`` as the
    sum of what it was given, where more than two add something up."""

    num_ranks: int
    part_bytes: int
    sum_bytes: int
    count: int

    @property
    def edges(self) -> tuple[SlotSpec, ...]:
        """Those for parts, and behind them those for sums; each in the order of ``pairs``."""
        kinds = [(self.part_bytes, self.count), (self.sum_bytes, _SUMS)]
        return tuple(
            SlotSpec(source=source, target=target, sizes=(size,), count=count, holds_all=True)
            for size, count in kinds
            if size
            for source, target in self.pairs
        )

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple(permutations(range(self.num_ranks), 2))

    @property
    def held_bytes(self) -> int:
        """On each rank, for what all others write."""
        return sum(edge.nbytes for edge in self.edges if edge.target == 0)


def rounds_of(graph: Graph) -> dict[str, CollectiveSlots]:
    """By axis, of all that is exchanged through slots, where nodes are carried out in this order.

    What one rank has written and another not read is under way at one of them: what the first one
    has read itself, the other one has written. So there is a slot for twice as many as are under
    way at one time, and nothing ever waits for one.
    """
    issued: dict[str, Collective] = {}
    now: dict[str, int] = {}
    most: dict[str, int] = {}
    for node in graph.nodes:
        if node.waits_for in issued:
            now[issued[node.waits_for].axis] -= 1
        if node.collective is not None and node.collective.is_pinned:
            issued[node.name], axis = node.collective, node.collective.axis
            now[axis] = now.get(axis, 0) + 1
            most[axis] = max(most.get(axis, 0), now[axis])
    by_axis: dict[str, list[Collective]] = {}
    for collective in issued.values():
        by_axis.setdefault(collective.axis, []).append(collective)
    return {axis: _rounds(each, 2 * most[axis]) for axis, each in by_axis.items()}


def _rounds(collectives: Sequence[Collective], count: int) -> CollectiveSlots:
    num_ranks = collectives[0].num_ranks
    parts, sums = 0, 0
    for collective in collectives:
        whole = collective.whole_bytes
        share = -(-whole // num_ranks) + _ODD
        if collective.kind is Exchange.ALL_REDUCE and num_ranks > 2:
            sums = max(sums, share)
        is_whole = collective.kind is Exchange.ALL_REDUCE and num_ranks == 2
        parts = max(parts, whole if is_whole else share)
    return CollectiveSlots(num_ranks=num_ranks, part_bytes=parts, sum_bytes=sums, count=count)
