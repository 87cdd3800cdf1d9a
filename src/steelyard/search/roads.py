"""When values leave for far memory and come back: lags and leads, and how long the device waits.

The tally's part for transfers: it mirrors what the offload trade writes and what predict/ plays.
Not for choosing what is moved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from steelyard.core.cluster import FAR_IN, FAR_OUT, far_room
from steelyard.core.collective import Collective, Exchange
from steelyard.core.costs import Costs
from steelyard.core.graph import Phase
from steelyard.core.program import Instruction, Program
from steelyard.search.counted import Floats, Ints


class Way(IntEnum):
    """How a value is moved: without ever waiting; away by the end of the forward pass at the
    latest, and not back before; or at the cost of all its way, so that it is here no line longer.
    """

    EASY = 0
    OVER_THE_TURN = 1
    AT_ONCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """``gone`` is the last line at which the near copy is there, ``back`` the first at which there
    is one again; both count copies.
    """

    lag: int
    lead: int
    gone: int
    back: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trips:
    """``seconds`` are those of one pass: waiting, and the calls themselves."""

    by_storage: Mapping[int, Trip] = field(default_factory=dict)
    seconds: float = 0.0
    nbytes: int = 0


NO_TRIPS = Trips()


@dataclass(slots=True)
class _Moved:
    """One value on its way; the rest are numbers of running operators, each the next to run."""

    storage: int
    way: Way
    made: int
    freed: int
    wanted: int
    sent: int = 0
    fetch: int = 0


class Roads:
    """The two links of one program, and what runs beside them."""

    def __init__(
        self,
        lines: Sequence[Instruction],
        program: Program,
        costs: Costs,
        values: Mapping[int, str],
    ) -> None:
        graph = program.graph
        whole = costs.whole_step_of(graph).value
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
        links = [costs.links[axis] for axis in (FAR_OUT, FAR_IN)]
        # While the device waits, there is nothing that a transfer could slow.
        self._spared = {1: whole * links[0].disturbs, 3: whole * links[1].disturbs}
        self._slowed = {
            s: whole * sum(link.disturbs * b / link.bytes_per_second for link in links)
            for s, b in self._nbytes.items()
        }
        self._own = {
            s: whole * sum(link.device_seconds(b, messages=1) for link in links)
            for s, b in self._nbytes.items()
        }

    def seconds_of(self, storage: int) -> float:
        return self._out[storage] + self._in[storage]

    def travelled(
        self,
        far: Mapping[int, Way],
        *,
        wanted: Mapping[int, int],
        forward_last: Sequence[int],
        shift: Ints,
        copies: Sequence[int],
        copy_seconds: Sequence[float],
        added_early: int,
    ) -> Trips:
        """``wanted`` is the line, copies counted, that first reads each value late; ``copies`` are
        all lines that were added, so many of them before the turn."""
        length = len(self._seconds) + len(copies)
        own = np.arange(len(self._seconds)) + shift
        seconds, runs = np.zeros(length), np.ones(length, dtype=bool)
        seconds[own], runs[own] = self._seconds, self._runs
        seconds[list(copies)] = np.array(copy_seconds) * self._whole
        before = np.concatenate(([0], np.cumsum(runs)))
        places = np.flatnonzero(runs)
        begins = np.concatenate(([0.0], np.cumsum(seconds[places])))
        turn = int(before[self._first_late + added_early])
        moved = [
            _Moved(
                storage=s,
                way=way,
                made=int(before[own[self._made[s]] + 1]),
                freed=int(before[own[max(forward_last[s], self._made[s])] + 1]),
                wanted=int(before[wanted[s]]),
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
            trips[m.storage] = Trip(
                lag=m.sent - m.made, lead=m.wanted - m.fetch, gone=gone, back=back
            )
        return Trips(
            by_storage=trips,
            seconds=self._waited(moved, wanted, begins) + sum(self._own[m.storage] for m in moved),
            nbytes=sum(far_room(self._nbytes[m.storage]) for m in moved),
        )

    def _set_fetches(
        self, moved: Sequence[_Moved], wanted: Mapping[int, int], begins: Floats, turn: int
    ) -> None:
        """As late as they can be issued and still arrive in time, one behind the other."""
        free_until = float(begins[-1])
        for m in sorted(moved, key=lambda m: (wanted[m.storage], m.storage), reverse=True):
            if m.way is Way.AT_ONCE:
                m.fetch = m.wanted
                continue
            free_until = min(float(begins[m.wanted]), free_until) - self._in[m.storage]
            latest = int(np.searchsorted(begins, free_until, side="right")) - 1
            earliest = m.made if m.way is Way.EASY else max(m.made, turn)
            m.fetch = min(max(latest, earliest), m.wanted)

    def _set_sends(self, moved: Sequence[_Moved], begins: Floats, turn: int) -> None:
        """Let go where they have surely arrived, or as early as is asked for."""
        idle = 0.0
        for m in sorted(moved, key=lambda m: (m.made, m.storage)):
            idle = max(idle, float(begins[m.made])) + self._out[m.storage]
            arrived = int(np.searchsorted(begins, idle, side="left"))
            if m.way is Way.OVER_THE_TURN:
                arrived = min(arrived, max(turn, m.freed))
            elif m.way is Way.AT_ONCE:
                arrived = min(arrived, m.freed)
            m.sent = min(max(arrived, m.made), m.fetch)

    def _waited(self, moved: Sequence[_Moved], wanted: Mapping[int, int], begins: Floats) -> float:
        """How long the device only waits, when all this is played; less what transfers would have
        slowed in that time.
        """
        events: list[tuple[int, int, int, int, _Moved]] = []
        for m in moved:
            place = wanted[m.storage]
            events += [
                (m.made, 0, place, 0, m), (m.sent, 1, place, 1, m),
                (m.fetch, 2, place, 2, m), (m.wanted, 3, place, 3, m),
            ]  # fmt: skip
        events.sort(key=lambda e: (*e[:3], e[4].storage))
        waited = spared = out_idle = in_idle = 0.0
        arrives: dict[tuple[int, int], float] = {}
        for number, _, _, kind, m in events:
            now = float(begins[number]) + waited
            if kind == 0:
                out_idle = max(now, out_idle) + self._out[m.storage]
                arrives[m.storage, 1] = out_idle
            elif kind == 2:
                in_idle = max(now, in_idle) + self._in[m.storage]
                arrives[m.storage, 3] = in_idle
            else:
                stall = max(0.0, arrives[m.storage, kind] - now)
                waited += stall
                spared += stall * self._spared[kind]
        return waited - min(spared, sum(self._slowed[m.storage] for m in moved))


def _takes(costs: Costs, axis: str, kind: Exchange, nbytes: int) -> float:
    collective = Collective(kind=kind, axis=axis, num_ranks=1, sent_bytes=nbytes, hops=1)
    return costs.exchange_seconds(collective).value
