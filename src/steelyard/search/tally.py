"""Count peak bytes and seconds of a set of recomputations without writing the program out.

The search's surrogate: it mirrors what the recompute trade writes and what predict/ counts there,
about thirty times as fast, and tests hold the two equal. Not for what is reported: a plan that
is returned has been written out and predicted whole.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steelyard.core.cluster import FAR_IN, FAR_OUT, FAR_PIECE_BYTES
from steelyard.core.costs import Costs
from steelyard.core.graph import OutputKind, Phase
from steelyard.core.program import Program
from steelyard.predict import peak_bytes, step_seconds
from steelyard.search.roads import NO_TRIPS, Roads, Trips, Way

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
# Later than any line.
NEVER = 1 << 40
_MOSTLY_HIDDEN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """``active`` are the operators that really run again; a chosen value nobody reads is free.

    ``moved`` are the choices to move to far memory that really do. ``held`` are the bytes at each
    line, copies included; ``shift`` how far copies have moved each line of the plain program;
    ``first`` the line at which each storage is first wanted late.
    """

    peak_bytes: int
    seconds: float
    active: tuple[int, ...]
    moved: tuple[int, ...]
    held: Floats
    shift: Ints
    first: list[int]

    def excess(self, peak_bytes: int) -> float:
        """Bytes above the limit, added over the lines."""
        return float(np.maximum(self.held - peak_bytes, 0.0).sum())

    def folded(self) -> Floats:
        """Peak bytes at each line of the plain program, the copies before it counted with it."""
        starts = np.arange(len(self.shift)) + np.concatenate(([0], self.shift[:-1]))
        folded: Floats = np.maximum.reduceat(self.held, starts)
        return folded

    def peak_line(self) -> int:
        """The line of the plain program at, or just before, which most is held."""
        return int(self.folded().argmax())


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One operator that can be called again: what it makes and reads, as storages."""

    node: str
    makes: tuple[int, ...]
    reads: tuple[int, ...]
    touches: tuple[int, ...]
    seconds: float
    flops: int
    workspace_bytes: int


class Tally:
    """A program without copies, laid out for counting; a choice is a set of numbers.

    A forward value is the storage it lies on; the number of that storage chooses to compute the
    value again, and ``far(storage, way)`` to move it to far memory and back. Lines are the computed
    instructions of the plain program, numbered; a copy stands just before the line of the backward
    pass that first needs it.
    """

    def __init__(
        self, program: Program, costs: Costs, values: Iterable[str], movable: Iterable[str] = ()
    ) -> None:
        assert not program.again
        self.program = program
        self._lines = [i for i in program.instructions if i.sink is None]
        late = (i for i, ins in enumerate(self._lines) if ins.phase is Phase.BACKWARD)
        self.first_late = next(late, len(self._lines))
        self._read_lifetimes()
        self._read_units(values, costs)
        self._lay_out(costs)
        self._set_scale(costs)
        self.wanted = self._first_wanted()
        self.far_value_on: dict[int, str] = {}
        self._roads = None
        if FAR_OUT in costs.links and FAR_IN in costs.links:
            self.far_value_on = {self._on[value][0]: value for value in movable}
            self._roads = Roads(self._lines, program, costs, self.far_value_on)

    @property
    def num_lines(self) -> int:
        return len(self._lines)

    def far(self, storage: int, way: Way) -> int:
        """The choice to move the value on this storage."""
        return len(self.nbytes) * (1 + way) + storage

    def storage(self, choice: int) -> int:
        return choice % len(self.nbytes)

    def way(self, choice: int) -> Way:
        """How the value is moved, of a choice to move it."""
        return Way(choice // len(self.nbytes) - 1)

    def is_far(self, choice: int) -> bool:
        return choice >= len(self.nbytes)

    def ways(self) -> list[int]:
        """All choices to move a value."""
        return [self.far(s, way) for way in Way for s in self.far_value_on]

    def far_seconds(self, storages: Iterable[int], *, share: float = 1.0) -> Floats:
        """A share of what each takes there and back; infinite for what cannot leave."""
        assert self._roads is not None
        roads, able = self._roads, self.far_value_on
        return np.array([share * roads.seconds_of(s) if s in able else np.inf for s in storages])

    def alone_seconds(self, choices: Iterable[int]) -> float:
        """What these would take if nothing hid it; of a transfer, a share: most are hidden."""
        again, far = self._parted(choices)
        seconds = self.seconds_of({self.unit_of[s] for s in again})
        if self._roads is not None:
            seconds += _MOSTLY_HIDDEN * sum(self._roads.seconds_of(s) for s in far)
        return seconds

    def _parted(self, choices: Iterable[int]) -> tuple[frozenset[int], dict[int, Way]]:
        """Storages to compute again; storages to move, and how. What is made again is not moved."""
        if not self.far_value_on:
            return frozenset(choices), {}
        count = len(self.nbytes)
        again = frozenset(c for c in choices if c < count)
        far = {c % count: Way(c // count - 1) for c in sorted(choices) if c >= count}
        return again, {s: way for s, way in far.items() if s not in again}

    def _read_lifetimes(self) -> None:
        """When each storage is born, last read in the forward pass, first and last afterwards."""
        graph = self.program.graph
        resident = {t.storage for node in graph.inputs() for t in node.outputs}
        count = len(graph.storages)
        self.nbytes = [s.nbytes for s in graph.storages]
        self.born = [NEVER] * count
        self.forward_last = [-1] * count
        self.late_first = [NEVER] * count
        self.late_last = [-1] * count
        on = {n.name: [s for s in graph.storages_of(n.name) if s not in resident]
              for n in graph.nodes}  # fmt: skip
        self._on = on
        self._touching = self._updates_touched()
        for line, instruction in enumerate(self._lines):
            for storage in on[instruction.node]:
                if self.born[storage] == NEVER:
                    self.born[storage] = line
                    last = self.forward_last if line < self.first_late else self.late_last
                    last[storage] = line
            for name in instruction.inputs:
                for storage in (*on[name], *self._touching.get(name, ())):
                    self._note_read(storage, line)
        self.storages = [s for s in range(count) if self.born[s] < NEVER]

    def _note_read(self, storage: int, line: int) -> None:
        if line < self.first_late:
            self.forward_last[storage] = max(self.forward_last[storage], line)
        else:
            self.late_first[storage] = min(self.late_first[storage], line)
            self.late_last[storage] = max(self.late_last[storage], line)

    def _updates_touched(self) -> dict[str, tuple[int, ...]]:
        """A new value of a buffer waits for the last reader of the old one, and lives as long."""
        graph = self.program.graph
        inputs = {node.name: node for node in graph.inputs()}
        touching: dict[str, tuple[int, ...]] = {}
        for output in graph.outputs:
            if output.kind is not OutputKind.UPDATE:
                continue
            old = {t.storage for t in inputs[output.target].outputs}
            new = tuple(self._on[output.node])
            for node in graph.nodes:
                if any(t.storage in old for t in node.outputs):
                    touching[node.name] = (*touching.get(node.name, ()), *new)
        return touching

    def _read_units(self, values: Iterable[str], costs: Costs) -> None:
        graph = self.program.graph
        chosen: dict[str, list[int]] = {}
        for value in values:
            node = graph.by_name[value]
            maker = node.inputs[0] if node.is_getitem else value
            chosen.setdefault(maker, []).append(self._on[value][0])
        self.units: list[Unit] = []
        self.unit_of: dict[int, int] = {}
        self.value_on: dict[int, str] = {self._on[value][0]: value for value in values}
        for instruction in self._lines[: self.first_late]:
            if instruction.node not in chosen:
                continue
            node = graph.by_name[instruction.node]
            for storage in chosen[node.name]:
                self.unit_of[storage] = len(self.units)
            self.units.append(
                Unit(
                    node=node.name,
                    makes=tuple(self._on[node.name]),
                    reads=tuple(dict.fromkeys(s for i in node.inputs for s in self._on[i])),
                    touches=tuple(s for i in node.inputs for s in self._touching.get(i, ())),
                    seconds=costs.seconds(node).value,
                    flops=node.flops,
                    workspace_bytes=costs.workspace_bytes(node),
                )
            )

    def _lay_out(self, costs: Costs) -> None:
        """The same as arrays, over the storages that the program itself makes."""
        graph, made = self.program.graph, self.storages
        self._bytes = np.array([self.nbytes[s] for s in made], dtype=np.float64)
        self._born = np.array([self.born[s] for s in made], dtype=np.int64)
        self._forward_last = np.array([self.forward_last[s] for s in made], dtype=np.int64)
        self._late_last = np.array([self.late_last[s] for s in made], dtype=np.int64)
        self._row = {s: row for row, s in enumerate(made)}
        self.workspace = np.array(
            [costs.workspace_bytes(graph.by_name[i.node]) for i in self._lines], dtype=np.float64
        )
        self.gradients = frozenset(
            s for o in graph.outputs if o.kind is OutputKind.GRADIENT for s in self._on[o.node]
        )
        loss = frozenset(self._on[self.program.loss] if self.program.loss else ())
        self.staying = self.gradients | loss
        self._gradients = np.array(
            [s in self.gradients and s not in loss for s in made], dtype=bool
        )
        self._stays = np.array([s in self.staying for s in made], dtype=bool)

    def _set_scale(self, costs: Costs) -> None:
        """Resident bytes, the optimizer's step and fixed seconds, as predict/ has them."""
        program = self.program
        bare = replace(program, instructions=())
        resting = bare
        if program.update is not None:
            resting = replace(bare, update=replace(program.update, instructions=()))
        self.resident_bytes = peak_bytes(resting, costs)
        self.left_bytes = int(self._bytes[self._stays].sum())
        self._update_bytes = peak_bytes(bare, costs) + self.left_bytes
        self.plain_seconds = step_seconds(program, costs).value
        self._factor = program.repeats * costs.whole_step_of(program.graph).value
        # What the optimizer's step moves takes its room, and its pieces are resident already.
        self._far_bytes = costs.far_bytes - program.far_bytes
        self._pieces_bytes = 0 if program.is_moving else 2 * FAR_PIECE_BYTES

    def storages_of(self, values: Iterable[str]) -> frozenset[int]:
        """The choice that recomputes these values."""
        return frozenset(self._on[value][0] for value in values)

    def flops_of(self, again: frozenset[int]) -> int:
        """All the program's, with those of what runs again."""
        more = sum(self.units[u].flops for u in self._place(self._parted(again)[0]).units)
        return self.program.flops + self.program.repeats * more

    def _first_wanted(self) -> list[int]:
        """The late line that ends the wait of a kept value; a guess where only copies read it."""
        wanted = self.late_first.copy()
        for unit in reversed(self.units):
            line = min(wanted[s] for s in unit.makes)
            for storage in unit.reads:
                if self.late_first[storage] == NEVER:
                    wanted[storage] = min(wanted[storage], line)
        return wanted

    def count(self, choice: frozenset[int]) -> Counted:
        """What the program costs when the backward pass reads copies of these."""
        again, far = self._parted(choice)
        copies = self._place(again)
        trips = self._trips(far, copies)
        held = self._held(again, copies, trips, accumulating=False)
        if self.program.repeats > 1:
            later = self._held(again, copies, trips, accumulating=True)
            held = np.maximum(held, later + self.left_bytes)
        pieces = self._pieces_bytes if trips.by_storage else 0
        held = held + self.resident_bytes + pieces
        if trips.nbytes > self._far_bytes:
            held = held + NEVER  # there is no room: no limit is that high
        seconds = self.seconds_of(copies.units) + self.program.repeats * trips.seconds
        return Counted(
            peak_bytes=max(self._update_bytes + pieces, int(held.max())),
            seconds=self.plain_seconds + seconds,
            active=copies.units,
            moved=tuple(self.far(s, far[s]) for s in trips.by_storage),
            held=held,
            shift=copies.shift,
            first=copies.first,
        )

    def lags_and_leads(self, choice: frozenset[int]) -> dict[str, tuple[int, int]]:
        """Of each value that is moved: how many operators run while it is on its way."""
        again, far = self._parted(choice)
        trips = self._trips(far, self._place(again))
        return {self.far_value_on[s]: (trip.lag, trip.lead) for s, trip in trips.by_storage.items()}

    def _trips(self, far: dict[int, Way], copies: "_Copies") -> Trips:
        if not far:
            return NO_TRIPS
        assert self._roads is not None
        seconds = [self.units[u].seconds for u in copies.units]
        position = {
            s: min(self._at(copies, self.late_first[s]), copies.first_read.get(s, NEVER))
            for s in far
        }
        return self._roads.travelled(
            far, wanted=position, forward_last=self.forward_last, shift=copies.shift,
            copies=copies.lines, copy_seconds=seconds,
        )  # fmt: skip

    def _at(self, copies: "_Copies", line: int) -> int:
        return line if line == NEVER else line + int(copies.shift[line])

    def seconds_of(self, units: Iterable[int]) -> float:
        return self._factor * sum(self.units[u].seconds for u in units)

    def _place(self, again: frozenset[int]) -> "_Copies":
        """Which operators run again, and before which line: the first that needs them."""
        first = self.late_first.copy()
        units, unit_of = self.units, self.unit_of
        placed: list[tuple[int, int]] = []
        for number in sorted({unit_of[s] for s in again}, reverse=True):
            unit = units[number]
            line = min(first[s] for s in unit.makes if s in again)
            if line == NEVER:
                continue
            placed.append((line, number))
            for storage in unit.reads:
                if line < first[storage]:
                    first[storage] = line
        placed.sort()
        last_read: dict[int, int] = {}
        first_read: dict[int, int] = {}
        for position, (line, number) in enumerate(placed):
            unit = units[number]
            for storage in (*unit.reads, *unit.touches):
                last_read[storage] = line + position
                first_read.setdefault(storage, line + position)
        before = np.bincount(
            np.array([line for line, _ in placed], dtype=np.int64), minlength=self.num_lines
        )
        return _Copies(
            units=tuple(number for _, number in placed),
            lines=tuple(line + position for position, (line, _) in enumerate(placed)),
            shift=np.cumsum(before),
            first=first,
            first_read=first_read,
            last_read=last_read,
        )

    def _held(
        self, again: frozenset[int], copies: "_Copies", trips: Trips, *, accumulating: bool
    ) -> Floats:
        """Bytes above the resident ones at each line, copies among them."""
        shift, row = copies.shift, self._row
        length = self.num_lines + len(copies.units)
        born = self._born + shift[self._born]
        late = np.where(self._late_last >= 0, self._late_last + shift[self._late_last], -1)
        dies = np.maximum(self._forward_last, late)
        copy_born: list[int] = []
        copy_dies: list[int] = []
        copy_rows: list[int] = []
        for number, line in zip(copies.units, copies.lines):
            for storage in self.units[number].makes:
                at = row[storage]
                copy_rows.append(at)
                copy_born.append(line)
                if storage in again:
                    dies[at] = self._forward_last[at]
                    copy_dies.append(max(line, int(late[at]), copies.last_read.get(storage, -1)))
                else:
                    copy_dies.append(line)
        for storage, line in copies.last_read.items():
            at = row[storage]
            if storage not in again and line > dies[at]:
                dies[at] = line
        for storage, trip in trips.by_storage.items():
            at = row[storage]
            copy_rows.append(at)
            copy_born.append(trip.back)
            copy_dies.append(int(dies[at]))
            dies[at] = max(int(self._forward_last[at]), trip.gone)
        stays = self._stays & ~self._gradients if accumulating else self._stays
        dies[stays] = length
        births = np.bincount(born, weights=self._bytes, minlength=length + 1)
        deaths = np.bincount(dies + 1, weights=self._bytes, minlength=length + 2)
        held = births[: length + 1] - deaths[: length + 1]
        if copy_rows:
            sizes = self._bytes[copy_rows]
            held += np.bincount(copy_born, weights=sizes, minlength=length + 1)
            held -= np.bincount(np.array(copy_dies) + 1, weights=sizes, minlength=length + 1)
        held = np.cumsum(held)[:length]
        workspace = np.zeros(length)
        workspace[np.arange(self.num_lines) + shift] = self.workspace
        workspace[list(copies.lines)] = [self.units[u].workspace_bytes for u in copies.units]
        total: Floats = held + workspace
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """Operators that run again and their lines in the longer program; how far others moved."""

    units: tuple[int, ...]
    lines: tuple[int, ...]
    shift: Ints
    first: list[int]
    first_read: dict[int, int]
    last_read: dict[int, int]
