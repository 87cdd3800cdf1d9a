"""The schedule of transfers to and from offload memory: lags, leads and device stalls.

This is a part of the fast estimator. It mirrors the programs that the offload trade writes, and the
timeline of predict/. Not for choosing the values to offload.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT, offload_room
from steelyard.ir.collective import Collective, Exchange
from steelyard.ir.graph import Phase
from steelyard.ir.program import Instruction, Program
from steelyard.predict.cost_table import CostTable
from steelyard.search.single.estimator.estimate import Floats, Ints
from steelyard.search.single.estimator.sliced_reads import SlicedRead


class TransferMode(IntEnum):
    """The timing of a value's transfers.

    - HIDDEN: transfers overlap fully with compute, so the device never stalls.
    - BETWEEN_PASSES: evicted by the end of the forward pass, and not fetched before the backward
      pass.
    - IMMEDIATE: on the device no longer than needed, at the cost of the full transfer time.
    - SLICED and SLICED_IMMEDIATE: fetched in slices by each product that reads it; evicted as in
      HIDDEN or as in IMMEDIATE.
    """

    HIDDEN = 0
    BETWEEN_PASSES = 1
    IMMEDIATE = 2
    SLICED = 3
    SLICED_IMMEDIATE = 4

    @property
    def is_sliced(self) -> bool:
        return self >= TransferMode.SLICED

    @property
    def unsliced(self) -> "TransferMode":
        """The corresponding mode for a value that cannot be read in slices."""
        return {
            TransferMode.SLICED: TransferMode.HIDDEN,
            TransferMode.SLICED_IMMEDIATE: TransferMode.IMMEDIATE,
        }.get(self, self)


# Fetching starts this many operators before the product, because most slices arrive while it runs.
_SLICE_LEAD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """The transfers of one offloaded value.

    ``evicted_at`` is the last line at which the device copy exists, ``restored_at`` the first line
    at which it exists again; both line numbers include recomputed copies. A sliced value is never
    restored as a whole. Each entry of ``slices`` has a first line, a last line, and the product
    whose slices are on the device between them.
    """

    lag: int
    lead: int
    evicted_at: int
    restored_at: int
    slices: tuple[tuple[int, int, SlicedRead], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlans:
    """The transfers of all values.

    ``seconds`` are those of one pass: stalls, and the device time of the transfer calls themselves.
    """

    by_storage: Mapping[int, TransferPlan] = field(default_factory=dict)
    seconds: float = 0.0
    nbytes: int = 0


NO_TRANSFERS = TransferPlans()


@dataclass(slots=True)
class _Transfer:
    """The transfers of one value, with kernels as the unit of time.

    Each time is the index of the kernel that runs next.
    """

    storage: int
    mode: TransferMode
    send_issue: int
    forward_end: int
    fetch_wait: int
    reads: Sequence[tuple[int, SlicedRead]] = ()
    send_wait: int = 0
    fetch_issue: int = 0

    @property
    def lead(self) -> int:
        return self.fetch_wait - self.fetch_issue

    def slices(self) -> list[tuple[int, int, SlicedRead]]:
        """Return the kernel of the first fetch, and the product, for each sliced read."""
        return [
            (max(self.send_issue, number - self.lead), number, read) for number, read in self.reads
        ]


class TransferLinks:
    """The two offload links of one program, and the computation that overlaps with them."""

    def __init__(
        self,
        lines: Sequence[Instruction],
        program: Program,
        costs: CostTable,
        values: Mapping[int, str],
        sliced: Mapping[int, Sequence[SlicedRead]],
    ) -> None:
        graph = program.graph
        step_factor = costs.whole_step_in(program.parts).value
        nodes = [graph.by_name[i.node] for i in lines]
        self._step_factor = step_factor
        self._seconds = np.array([costs.seconds(n).value for n in nodes]) * step_factor
        self._is_kernel = np.array([not n.is_free for n in nodes], dtype=bool)
        backward = [i for i, line in enumerate(lines) if line.phase is Phase.BACKWARD]
        self._backward_start = backward[0] if backward else len(lines)
        line_of = {line.value: i for i, line in enumerate(lines)}
        self._made_at = {s: line_of[v] for s, v in values.items()}
        self._nbytes = {s: graph.storages[s].nbytes for s in values}
        self._send_seconds = {
            s: _exchange_seconds(costs, OFFLOAD_OUT, Exchange.SEND, b)
            for s, b in self._nbytes.items()
        }
        self._fetch_seconds = {
            s: _exchange_seconds(costs, OFFLOAD_IN, Exchange.FETCH, b)
            for s, b in self._nbytes.items()
        }
        self._sliced = sliced
        self._slice_seconds = {
            (s, read.pieces): _exchange_seconds(
                costs, OFFLOAD_IN, Exchange.FETCH, self._nbytes[s] // read.pieces
            )
            for s, reads in sliced.items()
            for read in reads
        }
        out_link, in_link = links = costs.links[OFFLOAD_OUT], costs.links[OFFLOAD_IN]
        # While the device stalls, there is no kernel that a transfer could slow down.
        self._slowdown_rate = {
            1: step_factor * out_link.disturbs,
            3: step_factor * in_link.disturbs,
        }
        # For a whole fetch and for a sliced one: the slowdown that each value's transfers cause to
        # concurrent kernels, and the device time of the calls.
        self._slowdown_seconds: dict[tuple[int, bool], float] = {}
        self._call_seconds: dict[tuple[int, bool], float] = {}
        for s, b in self._nbytes.items():
            for is_sliced, pieces in (False, [1]), (True, [r.pieces for r in sliced.get(s, ())]):
                fetched_bytes = sum(count * (b // count) for count in pieces)
                seconds_per_byte = [link.disturbs / link.bytes_per_second for link in links]
                self._slowdown_seconds[s, is_sliced] = step_factor * (
                    seconds_per_byte[0] * b + seconds_per_byte[1] * fetched_bytes
                )
                calls = sum(in_link.device_seconds(b, messages=count) for count in pieces)
                self._call_seconds[s, is_sliced] = step_factor * (
                    out_link.device_seconds(b, messages=1) + calls
                )

    def seconds_of(self, storage: int) -> float:
        return self._send_seconds[storage] + self._fetch_seconds[storage]

    def schedule(
        self,
        modes: Mapping[int, TransferMode],
        *,
        needed_at: Mapping[int, int],
        forward_last: Sequence[int],
        shift: Ints,
        copies: Sequence[int],
        copy_seconds: Sequence[float],
        added_early: int,
    ) -> TransferPlans:
        """Return the transfers of the values in ``modes``, and the seconds that they add.

        ``needed_at`` is the line of the first backward read of each value, with copies included in
        the line number. ``copies`` are all lines that were added; ``added_early`` of them precede
        the backward pass.
        """
        length = len(self._seconds) + len(copies)
        new_line = np.arange(len(self._seconds)) + shift
        seconds, runs = np.zeros(length), np.ones(length, dtype=bool)
        seconds[new_line], runs[new_line] = self._seconds, self._is_kernel
        seconds[list(copies)] = np.array(copy_seconds) * self._step_factor
        reads = {
            s: self._sliced[s]
            for s, mode in modes.items()
            if mode.is_sliced and needed_at[s] < length
        }
        slicing_seconds = 0.0
        for read in (read for reads_of_value in reads.values() for read in reads_of_value):
            seconds[new_line[read.line]] += read.more_seconds * self._step_factor
            slicing_seconds += read.more_seconds * self._step_factor
        kernels_before = np.concatenate(([0], np.cumsum(runs)))
        places = np.flatnonzero(runs)
        begins = np.concatenate(([0.0], np.cumsum(seconds[places])))
        turn = int(kernels_before[self._backward_start + added_early])
        read_numbers = {
            s: [(int(kernels_before[new_line[read.line]]), read) for read in reads_of_value]
            for s, reads_of_value in reads.items()
        }
        transfers = [
            _Transfer(
                storage=s,
                mode=mode,
                send_issue=int(kernels_before[new_line[self._made_at[s]] + 1]),
                forward_end=int(
                    kernels_before[new_line[max(forward_last[s], self._made_at[s])] + 1]
                ),
                fetch_wait=read_numbers[s][0][0]
                if s in read_numbers
                else int(kernels_before[needed_at[s]]),
                reads=read_numbers.get(s, ()),
            )
            for s, mode in modes.items()
            if needed_at[s] < length
        ]
        self._set_fetches(transfers, needed_at, begins, turn)
        self._set_sends(transfers, begins, turn)
        plans = {}
        for m in transfers:
            evicted_at = int(places[m.send_wait - 1]) if m.send_wait else 0
            restored_at = (
                needed_at[m.storage]
                if m.fetch_issue == m.fetch_wait
                else int(places[m.fetch_issue])
            )
            slices = tuple(
                (int(places[fetch]), int(new_line[read.line]), read)
                for fetch, _, read in m.slices()
            )
            plans[m.storage] = TransferPlan(
                lag=m.send_wait - m.send_issue,
                lead=m.lead,
                evicted_at=evicted_at,
                restored_at=restored_at,
                slices=slices,
            )
        own_seconds = sum(self._call_seconds[m.storage, bool(m.reads)] for m in transfers)
        return TransferPlans(
            by_storage=plans,
            seconds=self._stall_seconds(transfers, needed_at, begins)
            + own_seconds
            + slicing_seconds,
            nbytes=sum(offload_room(self._nbytes[m.storage]) for m in transfers),
        )

    def _set_fetches(
        self,
        transfers: Sequence[_Transfer],
        needed_at: Mapping[int, int],
        begins: Floats,
        turn: int,
    ) -> None:
        """Issue each fetch as late as possible for it to arrive in time, one after another."""
        link_free_until = float(begins[-1])
        for m in sorted(transfers, key=lambda m: (needed_at[m.storage], m.storage), reverse=True):
            if m.mode is TransferMode.IMMEDIATE:
                m.fetch_issue = m.fetch_wait
                continue
            if m.mode.is_sliced:
                m.fetch_issue = max(m.send_issue, m.fetch_wait - _SLICE_LEAD)
                continue
            link_free_until = (
                min(float(begins[m.fetch_wait]), link_free_until) - self._fetch_seconds[m.storage]
            )
            latest = int(np.searchsorted(begins, link_free_until, side="right")) - 1
            earliest = m.send_issue if m.mode is TransferMode.HIDDEN else max(m.send_issue, turn)
            m.fetch_issue = min(max(latest, earliest), m.fetch_wait)

    def _set_sends(self, transfers: Sequence[_Transfer], begins: Floats, turn: int) -> None:
        """Evict each value when its send has certainly arrived, or earlier if its mode requires
        it.
        """
        link_free_at = 0.0
        for m in sorted(transfers, key=lambda m: (m.send_issue, m.storage)):
            link_free_at = (
                max(link_free_at, float(begins[m.send_issue])) + self._send_seconds[m.storage]
            )
            arrived = int(np.searchsorted(begins, link_free_at, side="left"))
            if m.mode is TransferMode.BETWEEN_PASSES:
                arrived = min(arrived, max(turn, m.forward_end))
            elif m.mode in (TransferMode.IMMEDIATE, TransferMode.SLICED_IMMEDIATE):
                arrived = min(arrived, m.forward_end)
            m.send_wait = min(max(arrived, m.send_issue), m.fetch_issue)

    def _stall_seconds(
        self, transfers: Sequence[_Transfer], needed_at: Mapping[int, int], begins: Floats
    ) -> float:
        """Simulate the transfers and return for how many seconds they stall the device.

        The slowdown that transfers would have caused during those stalls is subtracted.
        """
        events: list[tuple[int, int, int, _Transfer, SlicedRead | None]] = []
        for m in transfers:
            line = needed_at[m.storage]
            events += [(m.send_issue, 0, line, m, None), (m.send_wait, 1, line, m, None)]
            if not m.reads:
                events += [(m.fetch_issue, 2, line, m, None), (m.fetch_wait, 3, line, m, None)]
            for fetch, number, sliced in m.slices():
                events += [(fetch, 2, line, m, sliced), (number, 4, line, m, sliced)]
        events.sort(key=lambda e: (*e[:3], e[3].storage))
        stalled_seconds = avoided_slowdown = out_free_at = in_free_at = 0.0
        arrives: dict[tuple[int, int], float] = {}
        arriving: dict[tuple[int, int], deque[float]] = {}
        for number, kind, _, m, read in events:
            now = float(begins[number]) + stalled_seconds
            if kind == 0:
                out_free_at = max(now, out_free_at) + self._send_seconds[m.storage]
                arrives[m.storage, 1] = out_free_at
            elif read is not None:
                slices = arriving.setdefault((m.storage, read.line), deque())
                slice_seconds = self._slice_seconds[m.storage, read.pieces]
                if kind == 2:
                    for _ in range(min(2, read.pieces)):
                        in_free_at = max(now, in_free_at) + slice_seconds
                        slices.append(in_free_at)
                    continue
                stall_of_read, in_free_at = _stream_slices(
                    read, slices, now, in_free_at, slice_seconds, self._step_factor
                )
                stalled_seconds += stall_of_read
                avoided_slowdown += stall_of_read * self._slowdown_rate[3]
            elif kind == 2:
                in_free_at = max(now, in_free_at) + self._fetch_seconds[m.storage]
                arrives[m.storage, 3] = in_free_at
            else:
                stall = max(0.0, arrives[m.storage, kind] - now)
                stalled_seconds += stall
                avoided_slowdown += stall * self._slowdown_rate[kind]
        return stalled_seconds - min(
            avoided_slowdown,
            sum(self._slowdown_seconds[m.storage, bool(m.reads)] for m in transfers),
        )


def _stream_slices(
    read: SlicedRead,
    arriving: deque[float],
    now: float,
    link_free_at: float,
    slice_seconds: float,
    scale: float,
) -> tuple[float, float]:
    """Return the stall of a product that reads slices, and the time at which the link is free
    again.

    Each further slice is fetched once the buffer of the slice before the previous one is free.
    """
    stalled, clock = 0.0, now
    for number in range(read.pieces):
        if 0 < number < read.pieces - 1:
            link_free_at = max(clock, link_free_at) + slice_seconds
            arriving.append(link_free_at)
        stall = max(0.0, arriving.popleft() - clock)
        stalled += stall
        clock += stall + read.seconds * scale / read.pieces
    return stalled, link_free_at


def _exchange_seconds(costs: CostTable, axis: str, kind: Exchange, nbytes: int) -> float:
    collective = Collective(kind=kind, axis=axis, num_ranks=1, sent_bytes=nbytes, hops=1)
    return costs.exchange_seconds(collective).value
