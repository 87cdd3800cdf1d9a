"""When values leave for offload memory and come back: lags and leads, and how long the device
waits.

The tally's part for transfers: it mirrors what the offload trade writes and what predict/ plays.
Not for choosing what is moved.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from steelyard.hardware.cluster import FAR_IN, FAR_OUT, offload_room
from steelyard.ir.collective import Collective, Exchange
from steelyard.ir.graph import Phase
from steelyard.ir.program import Instruction, Program
from steelyard.predict.cost_table import CostTable
from steelyard.search.single.estimate import Floats, Ints
from steelyard.search.single.sliced_reads import SlicedRead


class TransferMode(IntEnum):
    """How a value is moved: without ever waiting; away by the end of the forward pass at the
    latest, and not back before; or at the cost of all its way, so that it is here no line longer.
    Or back in slices, for each product that reads it: away without waiting, or at once.
    """

    EASY = 0
    OVER_THE_TURN = 1
    AT_ONCE = 2
    IN_SLICES = 3
    IN_SLICES_AT_ONCE = 4

    @property
    def is_sliced(self) -> bool:
        return self >= TransferMode.IN_SLICES

    @property
    def whole(self) -> "TransferMode":
        """How a value is moved instead that cannot be sliced."""
        return {
            TransferMode.IN_SLICES: TransferMode.EASY,
            TransferMode.IN_SLICES_AT_ONCE: TransferMode.AT_ONCE,
        }.get(self, self)


# Slices begin to be fetched so many operators before they are read: most come while that goes on.
_LEAD_OF_SLICES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """``gone`` is the last line at which the near copy is there, ``back`` the first at which there
    is one again; both count copies. In slices there is none: some are there between two lines, for
    each product that reads them.
    """

    lag: int
    lead: int
    gone: int
    back: int
    slices: tuple[tuple[int, int, SlicedRead], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlans:
    """``seconds`` are those of one pass: waiting, and the calls themselves."""

    by_storage: Mapping[int, TransferPlan] = field(default_factory=dict)
    seconds: float = 0.0
    nbytes: int = 0


NO_TRIPS = TransferPlans()


@dataclass(slots=True)
class _Transfer:
    """One value on its way; the rest are numbers of running operators, each the next to run."""

    storage: int
    way: TransferMode
    made: int
    freed: int
    wanted: int
    reads: Sequence[tuple[int, SlicedRead]] = ()
    sent: int = 0
    fetch: int = 0

    @property
    def lead(self) -> int:
        return self.wanted - self.fetch

    def slices(self) -> list[tuple[int, int, SlicedRead]]:
        """In slices: when each product's begin to be fetched, and when it runs."""
        return [(max(self.made, number - self.lead), number, read) for number, read in self.reads]


class TransferLinks:
    """The two links of one program, and what runs beside them."""

    def __init__(
        self,
        lines: Sequence[Instruction],
        program: Program,
        costs: CostTable,
        values: Mapping[int, str],
        sliced: Mapping[int, Sequence[SlicedRead]],
    ) -> None:
        graph = program.graph
        whole = costs.whole_step_in(program.parts).value
        nodes = [graph.by_name[i.node] for i in lines]
        self._whole = whole
        self._seconds = np.array([costs.seconds(n).value for n in nodes]) * whole
        self._runs = np.array([not n.is_free for n in nodes], dtype=bool)
        late = [i for i, line in enumerate(lines) if line.phase is Phase.BACKWARD]
        self._first_late = late[0] if late else len(lines)
        place = {line.value: i for i, line in enumerate(lines)}
        self._made = {s: place[v] for s, v in values.items()}
        self._nbytes = {s: graph.storages[s].nbytes for s in values}
        self._out = {s: _takes(costs, FAR_OUT, Exchange.SEND, b) for s, b in self._nbytes.items()}
        self._in = {s: _takes(costs, FAR_IN, Exchange.FETCH, b) for s, b in self._nbytes.items()}
        self._sliced = sliced
        self._piece = {
            (s, read.pieces): _takes(costs, FAR_IN, Exchange.FETCH, self._nbytes[s] // read.pieces)
            for s, reads in sliced.items()
            for read in reads
        }
        out, back = links = costs.links[FAR_OUT], costs.links[FAR_IN]
        # While the device waits, there is nothing that a transfer could slow.
        self._spared = {1: whole * out.disturbs, 3: whole * back.disturbs}
        # What the transfers of each slow beside them, and what the calls take of the device: whole,
        # and in slices.
        self._slowed: dict[tuple[int, bool], float] = {}
        self._own: dict[tuple[int, bool], float] = {}
        for s, b in self._nbytes.items():
            for is_sliced, pieces in (False, [1]), (True, [r.pieces for r in sliced.get(s, ())]):
                came = sum(count * (b // count) for count in pieces)
                slow = [link.disturbs / link.bytes_per_second for link in links]
                self._slowed[s, is_sliced] = whole * (slow[0] * b + slow[1] * came)
                calls = sum(back.device_seconds(b, messages=count) for count in pieces)
                self._own[s, is_sliced] = whole * (out.device_seconds(b, messages=1) + calls)

    def seconds_of(self, storage: int) -> float:
        return self._out[storage] + self._in[storage]

    def travelled(
        self,
        far: Mapping[int, TransferMode],
        *,
        wanted: Mapping[int, int],
        forward_last: Sequence[int],
        shift: Ints,
        copies: Sequence[int],
        copy_seconds: Sequence[float],
        added_early: int,
    ) -> TransferPlans:
        """``wanted`` is the line, copies counted, that first reads each value late; ``copies`` are
        all lines that were added, so many of them before the turn."""
        length = len(self._seconds) + len(copies)
        own = np.arange(len(self._seconds)) + shift
        seconds, runs = np.zeros(length), np.ones(length, dtype=bool)
        seconds[own], runs[own] = self._seconds, self._runs
        seconds[list(copies)] = np.array(copy_seconds) * self._whole
        reads = {
            s: self._sliced[s] for s, way in far.items() if way.is_sliced and wanted[s] < length
        }
        more = 0.0
        for product in (product for products in reads.values() for product in products):
            seconds[own[product.line]] += product.more_seconds * self._whole
            more += product.more_seconds * self._whole
        before = np.concatenate(([0], np.cumsum(runs)))
        places = np.flatnonzero(runs)
        begins = np.concatenate(([0.0], np.cumsum(seconds[places])))
        turn = int(before[self._first_late + added_early])
        number = {
            s: [(int(before[own[read.line]]), read) for read in ours] for s, ours in reads.items()
        }
        moved = [
            _Transfer(
                storage=s,
                way=way,
                made=int(before[own[self._made[s]] + 1]),
                freed=int(before[own[max(forward_last[s], self._made[s])] + 1]),
                wanted=number[s][0][0] if s in number else int(before[wanted[s]]),
                reads=number.get(s, ()),
            )
            for s, way in far.items()
            if wanted[s] < length
        ]
        self._set_fetches(moved, wanted, begins, turn)
        self._set_sends(moved, begins, turn)
        trips = {}
        for m in moved:
            gone = int(places[m.sent - 1]) if m.sent else 0
            back = wanted[m.storage] if m.fetch == m.wanted else int(places[m.fetch])
            slices = tuple(
                (int(places[fetch]), int(own[read.line]), read) for fetch, _, read in m.slices()
            )
            trips[m.storage] = TransferPlan(
                lag=m.sent - m.made, lead=m.lead, gone=gone, back=back, slices=slices
            )
        own_seconds = sum(self._own[m.storage, bool(m.reads)] for m in moved)
        return TransferPlans(
            by_storage=trips,
            seconds=self._waited(moved, wanted, begins) + own_seconds + more,
            nbytes=sum(offload_room(self._nbytes[m.storage]) for m in moved),
        )

    def _set_fetches(
        self, moved: Sequence[_Transfer], wanted: Mapping[int, int], begins: Floats, turn: int
    ) -> None:
        """As late as they can be issued and still arrive in time, one behind the other."""
        free_until = float(begins[-1])
        for m in sorted(moved, key=lambda m: (wanted[m.storage], m.storage), reverse=True):
            if m.way is TransferMode.AT_ONCE:
                m.fetch = m.wanted
                continue
            if m.way.is_sliced:
                m.fetch = max(m.made, m.wanted - _LEAD_OF_SLICES)
                continue
            free_until = min(float(begins[m.wanted]), free_until) - self._in[m.storage]
            latest = int(np.searchsorted(begins, free_until, side="right")) - 1
            earliest = m.made if m.way is TransferMode.EASY else max(m.made, turn)
            m.fetch = min(max(latest, earliest), m.wanted)

    def _set_sends(self, moved: Sequence[_Transfer], begins: Floats, turn: int) -> None:
        """Let go where they have surely arrived, or as early as is asked for."""
        idle = 0.0
        for m in sorted(moved, key=lambda m: (m.made, m.storage)):
            idle = max(idle, float(begins[m.made])) + self._out[m.storage]
            arrived = int(np.searchsorted(begins, idle, side="left"))
            if m.way is TransferMode.OVER_THE_TURN:
                arrived = min(arrived, max(turn, m.freed))
            elif m.way in (TransferMode.AT_ONCE, TransferMode.IN_SLICES_AT_ONCE):
                arrived = min(arrived, m.freed)
            m.sent = min(max(arrived, m.made), m.fetch)

    def _waited(
        self, moved: Sequence[_Transfer], wanted: Mapping[int, int], begins: Floats
    ) -> float:
        """How long the device only waits, when all this is played; less what transfers would have
        slowed in that time.
        """
        events: list[tuple[int, int, int, _Transfer, SlicedRead | None]] = []
        for m in moved:
            place = wanted[m.storage]
            events += [(m.made, 0, place, m, None), (m.sent, 1, place, m, None)]
            if not m.reads:
                events += [(m.fetch, 2, place, m, None), (m.wanted, 3, place, m, None)]
            for fetch, number, product in m.slices():
                events += [(fetch, 2, place, m, product), (number, 4, place, m, product)]
        events.sort(key=lambda e: (*e[:3], e[3].storage))
        waited = spared = out_idle = in_idle = 0.0
        arrives: dict[tuple[int, int], float] = {}
        arriving: dict[tuple[int, int], deque[float]] = {}
        for number, kind, _, m, read in events:
            now = float(begins[number]) + waited
            if kind == 0:
                out_idle = max(now, out_idle) + self._out[m.storage]
                arrives[m.storage, 1] = out_idle
            elif read is not None:
                slices = arriving.setdefault((m.storage, read.line), deque())
                takes = self._piece[m.storage, read.pieces]
                if kind == 2:
                    for _ in range(min(2, read.pieces)):
                        in_idle = max(now, in_idle) + takes
                        slices.append(in_idle)
                    continue
                stalled, in_idle = _gone_through(read, slices, now, in_idle, takes, self._whole)
                waited += stalled
                spared += stalled * self._spared[3]
            elif kind == 2:
                in_idle = max(now, in_idle) + self._in[m.storage]
                arrives[m.storage, 3] = in_idle
            else:
                stall = max(0.0, arrives[m.storage, kind] - now)
                waited += stall
                spared += stall * self._spared[kind]
        return waited - min(spared, sum(self._slowed[m.storage, bool(m.reads)] for m in moved))


def _gone_through(
    read: SlicedRead, arriving: deque[float], now: float, idle: float, takes: float, whole: float
) -> tuple[float, float]:
    """How long a product waits for its slices, and until when the link is busy then: each further
    slice is asked for when the room of the last but one is free."""
    stalled, clock = 0.0, now
    for number in range(read.pieces):
        if 0 < number < read.pieces - 1:
            idle = max(clock, idle) + takes
            arriving.append(idle)
        stall = max(0.0, arriving.popleft() - clock)
        stalled += stall
        clock += stall + read.seconds * whole / read.pieces
    return stalled, idle


def _takes(costs: CostTable, axis: str, kind: Exchange, nbytes: int) -> float:
    collective = Collective(kind=kind, axis=axis, num_ranks=1, sent_bytes=nbytes, hops=1)
    return costs.exchange_seconds(collective).value
