"""Slots in the shared memory of one host, for messages whose shapes the plan determines.

Computes the number and size of slots before a run, for messages between pipeline stages and for
collectives. Not for transferring anything: see comm/shared_memory/same_host.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from steelyard.ir.collective import Collective, Exchange
from steelyard.ir.graph import Graph
from steelyard.ir.pipeline_schedule import AHEAD, ActionKind, Order, source_of
from steelyard.ir.pipeline_stages import PipelineStage

# The name, in a machine's costs, of the link for messages through such slots.
PINNED = "pinned"
# Values begin on a cache line, slots on a page.
_CACHE_LINE, _PAGE = 64, 4096
# One of several parts of a tensor may exceed their mean by this many bytes.
_PART_SLACK_BYTES = 16
# A rank writes the sum after the next one only when all ranks have read this one.
_SUM_SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSpec:
    """The slots for one kind of message from one rank to another.

    ``sizes`` are the maximum bytes of each value of a message. ``count`` slots suffice for the
    messages that are read at one time and those sent ahead, or for all messages of a step
    (``holds_all``).
    """

    source: int
    target: int
    sizes: tuple[int, ...]
    count: int
    holds_all: bool

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each value in a slot."""
        found, end = [], 0
        for size in self.sizes:
            found.append(end)
            end += -(-size // _CACHE_LINE) * _CACHE_LINE
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
    """The slots for the inputs of ``stage`` from a stage on another rank, one per micro-batch."""

    stage: int
    is_back: bool


def edges_of(
    order: Order, stages: Sequence[PipelineStage], graph: Graph
) -> tuple[StageSlotSpec, ...]:
    """Return the slots between stages, in stage order, forward messages before backward ones."""
    rank_of = order.rank_of
    found = []
    for stage in stages:
        for is_back, names in ((False, stage.receives), (True, stage.receives_back)):
            source = stage.index + (1 if is_back else -1)
            if not names or rank_of[source] == rank_of[stage.index]:
                continue
            at_once = max(_messages_in_use(order, stage, graph, is_back=is_back))
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
    """Return the bytes for each rank if all allocate as much as the rank that receives most."""
    bytes_by_rank: dict[int, int] = {}
    for edge in edges:
        bytes_by_rank[edge.target] = bytes_by_rank.get(edge.target, 0) + edge.nbytes
    return max(bytes_by_rank.values(), default=0)


def _messages_in_use(
    order: Order, stage: PipelineStage, graph: Graph, *, is_back: bool
) -> Iterator[int]:
    """Yield the number of messages in use during each action of the stage.

    A message is in use while it is read, or saved to be read by a later action.
    """
    names = stage.receives_back if is_back else stage.receives
    own = {s for name in names for s in graph.storages_of(name)}
    saved = own & {s for name in stage.kept for s in graph.storages_of(name)}
    saved_between = own & {s for name in stage.kept_between for s in graph.storages_of(name)}
    in_use: set[int] = set()
    for action in order.ranks[order.rank_of[stage.index]]:
        if action.stage != stage.index:
            continue
        is_received = source_of(action, order.rank_of) is not None
        if is_received and (action.work is not ActionKind.FORWARD) == is_back:
            in_use.add(action.micro_batch)
        yield len(in_use)
        saved_after = {
            ActionKind.FORWARD: saved,
            ActionKind.BACK_TO_INPUTS: saved_between,
        }.get(action.work)
        if not saved_after:
            in_use.discard(action.micro_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSlots:
    """The slots of an axis for collectives.

    ``part_bytes`` is the maximum size of a part that a rank sends to a peer; there are ``count``
    slots for such parts. ``sum_bytes`` is the maximum size of a reduced part; it is 0 unless more
    than two ranks reduce.
    """

    num_ranks: int
    part_bytes: int
    sum_bytes: int
    count: int

    @property
    def edges(self) -> tuple[SlotSpec, ...]:
        """The slots for parts, followed by the slots for sums; both in the order of ``pairs``."""
        kinds = [(self.part_bytes, self.count), (self.sum_bytes, _SUM_SLOTS)]
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
        """Bytes on each rank for the slots into which all other ranks write."""
        return sum(edge.nbytes for edge in self.edges if edge.target == 0)


def rounds_of(graph: Graph) -> dict[str, CollectiveSlots]:
    """Return the slots of each axis, for the pinned collectives in this order of nodes.

    If one rank has written a message that another has not read, its collective is in flight at one
    of the two: the writer has read all earlier messages, so its peer has written them. Therefore
    twice as many slots as collectives in flight suffice, and no rank ever waits for a slot.
    """
    collectives: dict[str, Collective] = {}
    in_flight: dict[str, int] = {}
    most_in_flight: dict[str, int] = {}
    for node in graph.nodes:
        if node.waits_for in collectives:
            in_flight[collectives[node.waits_for].axis] -= 1
        if node.collective is not None and node.collective.is_pinned:
            collectives[node.name], axis = node.collective, node.collective.axis
            in_flight[axis] = in_flight.get(axis, 0) + 1
            most_in_flight[axis] = max(most_in_flight.get(axis, 0), in_flight[axis])
    by_axis: dict[str, list[Collective]] = {}
    for collective in collectives.values():
        by_axis.setdefault(collective.axis, []).append(collective)
    return {
        axis: _collective_slots(each, 2 * most_in_flight[axis]) for axis, each in by_axis.items()
    }


def _collective_slots(collectives: Sequence[Collective], count: int) -> CollectiveSlots:
    num_ranks = collectives[0].num_ranks
    part_bytes, sum_bytes = 0, 0
    for collective in collectives:
        full_bytes = collective.whole_bytes
        share = -(-full_bytes // num_ranks) + _PART_SLACK_BYTES
        if collective.kind is Exchange.ALL_REDUCE and num_ranks > 2:
            sum_bytes = max(sum_bytes, share)
        is_whole = collective.kind is Exchange.ALL_REDUCE and num_ranks == 2
        part_bytes = max(part_bytes, full_bytes if is_whole else share)
    return CollectiveSlots(
        num_ranks=num_ranks, part_bytes=part_bytes, sum_bytes=sum_bytes, count=count
    )
