"""The time and bytes that the transfers of a step take: a counter, and the median of a step.

Counts transfers to offload memory and to other ranks. Not for memory: see memory_meter.py.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from steelyard.api.rank_context import RankContext
from steelyard.comm.tcp_counters import SentBytesCounter
from steelyard.ir.parallel_layout import DATA
from steelyard.offload.tier import OffloadFile
from steelyard.run.step import LiveStep

# The byte counter looks for new connections at these calls: before, between and after the first
# steps.
_CONNECTION_SCANS = 4


class Traffic(NamedTuple):
    """Time and bytes spent on transfers.

    ``busy``: seconds during which values moved to or from offload memory. ``waited``: seconds of
    waiting for these transfers or for other ranks. ``sent``: bytes that this rank sent to other
    ranks. ``coding``: seconds in which it encoded and decoded gradients.
    """

    busy: float
    waited: float
    sent: float
    coding: float


class TrafficCounter:
    """Counts the traffic of a live step on this rank."""

    def __init__(
        self, live: LiveStep, ranks: RankContext, *, offload_file: OffloadFile | None
    ) -> None:
        self._live, self._offload_file = live, offload_file
        self.change_ranks(ranks)

    def change_ranks(self, ranks: RankContext) -> None:
        """Count the bytes sent to these ranks, from new connections on."""
        self._ranks, self._sent_counter, self._num_scans = ranks, SentBytesCounter(), 0

    def total(self) -> Traffic:
        """Return the traffic so far."""
        busy = waited = sent = coded = 0.0
        if self._ranks.channels:
            if self._num_scans < _CONNECTION_SCANS:  # connections are opened on first use
                self._num_scans += 1
                self._sent_counter.look()
            waited = sum(channel.waiting.seconds for channel in self._ranks.channels.values())
            coded = sum(channel.coding.seconds for channel in self._ranks.channels.values())
            moved = sum(channel.waiting.moved_bytes for channel in self._ranks.channels.values())
            sent = self._sent_counter.sent_bytes + self._live.moved_bytes + moved
            sent -= self._ranks.coordinator.asked_bytes
        if self._offload_file is not None:
            busy, waited = (
                self._offload_file.busy_seconds,
                self._offload_file.waited_seconds + waited,
            )
        return Traffic(busy, waited, sent, coded)

    def median_exchange(self, samples: Sequence[Traffic]) -> tuple[float | None, float, int | None]:
        """Return the transfer seconds, the waiting seconds and the sent bytes of the median step.

        Transfer seconds are None with several ranks: torch does not report when a collective has
        ended. Sent bytes are None if they were not counted.
        """
        found, has_ranks = median_traffic(samples), bool(self._ranks.channels)
        if found is None:
            return (None if self._offload_file or has_ranks else 0.0), 0.0, None
        sent = round(found.sent) if has_ranks and self._counts_sent_bytes else None
        return (None if has_ranks else found.busy), found.waited, sent

    @property
    def _counts_sent_bytes(self) -> bool:
        """True if all bytes sent to other ranks are counted.

        The kernel counts the bytes sent over connections; bytes in message slots are counted here.
        NCCL does not report what it sends.
        """
        if all(channel.backend == "gloo" for channel in self._ranks.channels.values()):
            return self._sent_counter.is_counted
        program = self._live.program
        collectives = (
            node.collective for node in program.graph.nodes if node.collective is not None
        )
        summed = program.pipeline is not None and (
            DATA in self._ranks.groups or program.pipeline.stages.shared
        )
        return (
            self._sent_counter.is_counted and not summed and all(c.is_pinned for c in collectives)
        )


def median_traffic(traffic: Sequence[Traffic]) -> Traffic | None:
    """Return the median traffic of a step, without the first step; None before the second."""
    added = [[b - a for a, b in zip(*both)] for both in pairwise(traffic)][1:]
    return Traffic(*map(median, zip(*added))) if added else None
