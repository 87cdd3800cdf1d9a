"""The messages between the stages of a pipeline: their seconds, the work at both ends, and slots.

Not for messages in flight: see replay.py. Not for collectives of gradients: see
gradient_reduction.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from steelyard.errors import BadInput
from steelyard.hardware.link import Link
from steelyard.ir.collective import Collective, Exchange
from steelyard.ir.message_slots import PINNED, edges_of, evenly_held_bytes
from steelyard.ir.metrics import Estimate
from steelyard.ir.parallel_layout import PIPELINE, ParallelLayout
from steelyard.ir.pipeline_schedule import ActionKind
from steelyard.ir.pipeline_stages import PipelineStage
from steelyard.ir.program import Pipeline
from steelyard.ir.rule import trade_name
from steelyard.ir.rule_kinds import SharedMemoryMessages
from steelyard.passes.pipeline.in_place_sends import written_in_place
from steelyard.predict.cost_table import CostTable
from steelyard.predict.pipeline.replay import StageCost
from steelyard.predict.timeline import Pick, value

# Overhead of torch's and our schedule for an action, as a multiple of the measured time of a call
# that sends a message: 0.13 to 0.16 ms if such a call takes 0.028 ms (docs/log.md, 2026-11-25).
_CALLS_OF_ACTION = 5


def message_of(layout: ParallelLayout, nbytes: int) -> Collective:
    """Return a message of ``nbytes`` between stages, over the slowest of the links between them.

    It is priced as an all-gather of two ranks, which takes the same time.
    """
    return Collective(
        kind=Exchange.ALL_GATHER, axis=PIPELINE, num_ranks=2, sent_bytes=nbytes, hops=1,
        # Ranks of one pipeline have the largest stride of the layout.
        stride=layout.num_ranks // layout.pipeline, places=tuple(range(layout.pipeline)),
    )  # fmt: skip


class StageMessages:
    """The messages of one pipeline; ``slots`` are the slots in memory that ranks share, if any."""

    def __init__(self, layout: ParallelLayout, pipeline: Pipeline, costs: CostTable) -> None:
        self._layout, self._costs = layout, costs
        self._graph, self._stages = pipeline.stages.graph, pipeline.stages.stages
        order, self._rank_of = pipeline.order, pipeline.order.rank_of
        self._order = order
        self._copies: dict[tuple[int, ActionKind], Sequence[str]] = {}
        self.slots = edges_of(order, self._stages, self._graph) if pipeline.is_pinned else ()
        if self.slots and PINNED not in costs.links:
            raise BadInput(
                "the plan sends pipeline messages through shared memory, but these ranks have "
                "none in common",
                expected="ranks of this machine, of one user, that see each other's processes",
                remedy=f"remove [[{trade_name(SharedMemoryMessages)}]] from the plan, or plan "
                "again for these ranks",
            )

    def with_overhead(self, stage: PipelineStage, link: Pick | None, cost: StageCost) -> StageCost:
        """Add the device time of schedule calls and of messages to and from other ranks."""
        link_class = self._costs.link_of(self._message(0))
        if link is None or link_class is None:
            return cost
        before, after = self._is_on_other_rank(stage, -1), self._is_on_other_rank(stage, +1)
        forward = stage.receives if before else (), stage.sends if after else ()
        backward = stage.receives_back if after else (), stage.sends_back if before else ()
        crossing = {
            ActionKind.FORWARD: forward,
            ActionKind.BACKWARD: backward,
            ActionKind.BACK_TO_INPUTS: backward,
            ActionKind.BACK_TO_WEIGHTS: ((), ()),
        }
        own = {
            work: self._overhead(reads, sends, link_class, copied=self._copied(stage, work, sends))
            for work, (reads, sends) in crossing.items()
        }
        return replace(cost, seconds={w: s + own[w] for w, s in cost.seconds.items()})

    @property
    def disturbs(self) -> float:
        """Return the share by which a message in flight slows down the work of both ranks.

        Messages through slots do not: each rank copies into them itself.
        """
        link_class = self._costs.link_of(self._message(0))
        return 0.0 if link_class is None or self.slots else link_class.disturbs

    def _copied(self, stage: PipelineStage, work: ActionKind, sent: Sequence[str]) -> Sequence[str]:
        """Return the sent values that are not computed in their slot, and so must be copied to
        it.
        """
        if not sent or not self.slots:
            return sent
        key = stage.index, work
        if key in self._copies:
            return self._copies[key]
        part, saved = {
            ActionKind.FORWARD: (stage.forward, stage.kept),
            ActionKind.BACKWARD: (stage.backward, ()),
            ActionKind.BACK_TO_INPUTS: (stage.back_to_inputs, stage.kept_between),
        }[work]
        in_place = written_in_place(part, sent, kept=saved)
        copied = self._copies[key] = [name for name in sent if name not in in_place]
        return copied

    def _overhead(
        self, reads: Sequence[str], sends: Sequence[str], link_class: Link, *, copied: Sequence[str]
    ) -> float:
        """Return the device time of an action in addition to its own work.

        If there are slots, all values form one message, and the sender copies those that were not
        computed in place.
        """
        received, sent = self._sizes(reads), self._sizes(sends)
        if not self.slots:
            return link_class.device_seconds(
                0, messages=len(received) + len(sent) + _CALLS_OF_ACTION
            )
        slots = self._costs.links[PINNED]
        own = link_class.device_seconds(0, messages=_CALLS_OF_ACTION)
        messages = bool(received) + bool(sent)
        return own + slots.device_seconds(sum(self._sizes(copied)), messages=messages)

    def slots_bytes(self, rank: int) -> int:
        """Return the bytes of a rank's message slots.

        Slots are in the memory of the receiver; if it is on another host, the sender has them too.
        """
        if not self.slots:
            return 0
        slots = self._costs.links[PINNED]
        if slots.is_even:
            return evenly_held_bytes(self.slots)
        return sum(
            edge.nbytes
            for edge in self.slots
            if edge.target == rank or (slots.is_remote and edge.source == rank)
        )

    def _sizes(self, names: Sequence[str]) -> list[int]:
        return [sum(t.nbytes for t in self._graph.by_name[n].outputs) for n in names]

    def _is_on_other_rank(self, stage: PipelineStage, step: int) -> bool:
        """True if the stage before or after this one is on another rank."""
        other = min(max(stage.index + step, 0), len(self._stages) - 1)
        return self._rank_of[other] != self._rank_of[stage.index]

    def without_slots(self, stage: PipelineStage, cost: StageCost) -> StageCost:
        """Return the cost of a stage without values in slots, which count as resident."""
        if not self.slots:
            return cost
        before, after = self._is_on_other_rank(stage, -1), self._is_on_other_rank(stage, +1)
        slots = {**(cost.receives if before else {}), **(cost.receives_back if after else {})}
        return replace(
            cost,
            receives={} if before else cost.receives,
            receives_back={} if after else cost.receives_back,
            sends={} if after else cost.sends,
            sends_back={} if before else cost.sends_back,
            kept={key: n for key, n in cost.kept.items() if key not in slots},
            kept_between={key: n for key, n in cost.kept_between.items() if key not in slots},
        )

    def transfer_seconds(self, sizes: Sequence[int], link: Pick | None) -> float:
        """Return the seconds to send values to another stage, without the device time."""
        if not self.slots or link is None:
            return self.send_seconds(sizes, link)
        slots = self._costs.links[PINNED]
        seconds = slots.latency_seconds
        if slots.is_remote:
            seconds = slots.seconds(sum(sizes), messages=1)
        within = Estimate.within(seconds, share=slots.doubt)
        return link(within) if sizes else 0.0

    def send_seconds(self, sizes: Sequence[int], link: Pick | None) -> float:
        """Return the seconds to send one message for each value.

        A message is priced as an all-gather of two ranks.
        """
        if link is None:
            return 0.0
        return sum(link(self._costs.exchange_seconds(self._message(nbytes))) for nbytes in sizes)

    def _message(self, nbytes: int) -> Collective:
        return message_of(self._layout, nbytes)

    def communication_seconds(self, sizes: Sequence[int], copied: Sequence[int]) -> float:
        """Return the seconds in which messages are sent.

        With slots on one host, only the sender's copies take time.
        """
        if not self.slots:
            return self.send_seconds(sizes, value)
        slots = self._costs.links[PINNED]
        return slots.seconds(sum(sizes if slots.is_remote else copied), messages=1)

    def edges(self) -> list[tuple[int, int, list[int], list[int]]]:
        """Return the edges from one rank to another.

        An edge consists of both ranks, the bytes of each value, and the bytes of each value that is
        copied.
        """
        found = []
        last = len(self._stages) - 1
        works = {action.work for actions in self._order.ranks for action in actions}
        back = (
            ActionKind.BACK_TO_INPUTS if ActionKind.BACK_TO_INPUTS in works else ActionKind.BACKWARD
        )
        for stage in self._stages:
            index, rank = stage.index, self._rank_of[stage.index]
            for names, work, other in (
                (stage.sends, ActionKind.FORWARD, min(index + 1, last)),
                (stage.sends_back, back, max(index - 1, 0)),
            ):
                if names and self._rank_of[other] != rank:
                    copied = self._sizes(self._copied(stage, work, names))
                    found.append((rank, self._rank_of[other], self._sizes(names), copied))
        return found
