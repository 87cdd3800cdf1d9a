"""Count peak bytes and seconds of a set of recomputations without writing the program out.

The search's surrogate: it mirrors what the recompute trade writes and what predict/ counts there,
about thirty times as fast, and tests hold the two equal. Not for what is reported: a plan that
is returned has been written out and predicted whole.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from steelyard.hardware.cluster import FAR_IN, FAR_OUT, OFFLOAD_PIECE_BYTES
from steelyard.ir.graph import OutputKind, Phase
from steelyard.ir.program import Program
from steelyard.passes.recompute_copies import late_reads
from steelyard.predict import peak_bytes, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.predict.liveness import held_underway
from steelyard.search.single.copy_placement import (
    NEVER,
    NO_CODES,
    Codes,
    Copies,
    CopyPlacement,
    placed,
)
from steelyard.search.single.estimate import Coder, Floats, PeakEstimate, RecomputableUnit
from steelyard.search.single.lifetimes import Lifetimes
from steelyard.search.single.sliced_reads import SlicedRead, sliced_reads
from steelyard.search.single.transfer_timing import (
    NO_TRIPS,
    TransferLinks,
    TransferMode,
    TransferPlan,
    TransferPlans,
)

_MOSTLY_HIDDEN = 0.1
# Choices are storages, then storages to move in each way, then storages to keep in 8 bits, then
# storages to make twice, thrice, and so on.
_IN_8_BITS = 1 + len(TransferMode)


class FastEstimator:
    """A program without copies, laid out for counting; a choice is a set of numbers.

    A forward value is the storage it lies on; the number of that storage chooses to compute the
    value again, ``often(storage, times)`` beside it to do so more than once, ``far(storage, way)``
    to move it to offload memory and back, and ``coded(storage)`` to keep it in 8 bits. Lines are
    the computed instructions of the plain program, numbered; a copy stands just before the line of
    the backward pass that first needs it. ``slices`` are of the movable values that may come back
    so.
    """

    def __init__(
        self,
        program: Program,
        costs: CostTable,
        values: Iterable[str],
        movable: Iterable[str] = (),
        codable: Iterable[str] = (),
        slices: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        assert not program.again
        self.program = program
        self._lines = [i for i in program.instructions if i.sink is None]
        late = (i for i, ins in enumerate(self._lines) if ins.phase is Phase.BACKWARD)
        self.first_late = next(late, len(self._lines))
        underway = held_underway(replace(program, instructions=tuple(self._lines)))
        self._underway = [(e.issue, e.wait, nbytes) for e, nbytes in underway if e.wait is not None]
        self._read_lifetimes()
        self._read_units(values, costs)
        self._lay_out(costs)
        self._set_scale(costs)
        self.wanted = self._first_wanted()
        self.far_value_on: dict[int, str] = {}
        self.slices = slices
        self.least_workspace = self.workspace.copy()
        self.quickened_seconds = 0.0
        self.sliced: Mapping[int, Sequence[SlicedRead]] = {}
        self._roads = None
        if FAR_OUT in costs.links and FAR_IN in costs.links:
            self.far_value_on = {self._on[value][0]: value for value in movable}
            reads = sliced_reads(program, self._lines, slices, costs)
            self.sliced = {self._on[value][0]: own for value, own in reads.items()}
            for read in (read for own in reads.values() for read in own):
                self.least_workspace[read.line] += min(0, read.more_workspace)
                self.quickened_seconds += self._factor * max(0.0, -read.more_seconds)
            self._roads = TransferLinks(self._lines, program, costs, self.far_value_on, self.sliced)
        self.coded_value_on = {self._on[value][0]: value for value in codable}
        self._coders = {
            s: Coder.of(program.graph, value, costs) for s, value in self.coded_value_on.items()
        }

    @property
    def num_lines(self) -> int:
        return len(self._lines)

    def far(self, storage: int, way: TransferMode) -> int:
        """The choice to move the value on this storage."""
        return len(self.nbytes) * (1 + way) + storage

    def coded(self, storage: int) -> int:
        """The choice to keep the value on this storage in 8 bits."""
        return len(self.nbytes) * _IN_8_BITS + storage

    def often(self, storage: int, times: int) -> int:
        """The choice to compute the value on this storage again so many times at most."""
        return len(self.nbytes) * (_IN_8_BITS + times - 1) + storage

    def storage(self, choice: int) -> int:
        return choice % len(self.nbytes)

    def way(self, choice: int) -> TransferMode:
        """How the value is moved, of a choice to move it."""
        return TransferMode(choice // len(self.nbytes) - 1)

    def is_again(self, choice: int) -> bool:
        return choice < len(self.nbytes)

    def is_often(self, choice: int) -> bool:
        return choice // len(self.nbytes) > _IN_8_BITS

    def times(self, choice: int) -> int:
        """How often at most it computes a value again, of a choice to do so more than once."""
        return choice // len(self.nbytes) - _IN_8_BITS + 1

    def once_less(self, choice: int) -> int:
        """The choice that must stand beside such a one."""
        return self.storage(choice) if self.times(choice) == 2 else choice - len(self.nbytes)

    def is_far(self, choice: int) -> bool:
        return 1 <= choice // len(self.nbytes) < _IN_8_BITS

    def is_coded(self, choice: int) -> bool:
        return choice // len(self.nbytes) == _IN_8_BITS

    def unsliced(self, choices: Iterable[int]) -> frozenset[int]:
        """The same, but what comes back in slices comes back whole."""
        return frozenset(
            self.far(self.storage(c), self.way(c).whole) if self.is_far(c) else c for c in choices
        )

    def value_away(self, choice: int) -> str:
        """The value that such a choice moves or keeps in 8 bits."""
        values = self.coded_value_on if self.is_coded(choice) else self.far_value_on
        return values[self.storage(choice)]

    def elsewhere(self) -> list[int]:
        """All choices to move a value, or to keep it in 8 bits."""
        far = [
            self.far(s, way)
            for way in TransferMode
            for s in (self.sliced if way.is_sliced else self.far_value_on)
        ]
        return far + [self.coded(s) for s in self.coded_value_on]

    def far_seconds(self, storages: Iterable[int], *, share: float = 1.0) -> Floats:
        """A share of what each takes there and back; infinite for what cannot leave."""
        assert self._roads is not None
        roads, able = self._roads, self.far_value_on
        return np.array([share * roads.seconds_of(s) if s in able else np.inf for s in storages])

    def alone_seconds(self, choices: Collection[int]) -> float:
        """What these would take if nothing hid it; of a transfer, a share: most are hidden."""
        again, far, coded = self._parted(choices)
        seconds = self.seconds_of({self.unit_of[s] for s in again})
        seconds += sum(self._coding_seconds(s) for s in coded)
        more = (self.storage(c) for c in choices if self.is_often(c))
        seconds += self.seconds_of(self.unit_of[s] for s in more)
        if self._roads is not None:
            seconds += _MOSTLY_HIDDEN * sum(self._roads.seconds_of(s) for s in far)
        return seconds

    def coded_prices(self, storages: Iterable[int]) -> tuple[Floats, Floats]:
        """Of each, seconds to write it down and read it back (infinite for what cannot be), and its
        bytes in between as a share of its own."""
        able = list(storages)
        seconds = [self._coding_seconds(s) if s in self._coders else np.inf for s in able]
        shares = [
            self._coders[s].nbytes / self.nbytes[s] if s in self._coders else 1.0 for s in able
        ]
        return np.array(seconds), np.array(shares)

    def _coding_seconds(self, storage: int) -> float:
        return self._factor * self._coders[storage].seconds

    def _parted(
        self, choices: Collection[int]
    ) -> tuple[frozenset[int], dict[int, TransferMode], tuple[int, ...]]:
        """Storages to compute again; to move, and how; to keep in 8 bits.

        A value has one fate: it is made again rather than coded, and coded rather than moved.
        """
        count = len(self.nbytes)
        if max(choices, default=0) < count:
            return frozenset(choices), {}, ()
        in_order = sorted(choices)
        again = frozenset(c for c in in_order if c < count)
        coded = tuple(c % count for c in in_order if self.is_coded(c) and c % count not in again)
        far = {c % count: self.way(c) for c in in_order if self.is_far(c)}
        taken = again.union(coded)
        return again, {s: way for s, way in far.items() if s not in taken}, coded

    def times_of(self, choices: Collection[int]) -> dict[int, int]:
        """The storages that are computed again more than once, and how often at most."""
        fewest = self.often(0, 2)
        if max(choices, default=0) < fewest:
            return {}
        often = sorted(choice for choice in choices if choice >= fewest)
        return {self.storage(choice): self.times(choice) for choice in often}

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

    def _read_units(self, values: Iterable[str], costs: CostTable) -> None:
        graph = self.program.graph
        chosen: dict[str, list[int]] = {}
        for value in values:
            node = graph.by_name[value]
            maker = node.inputs[0] if node.is_getitem else value
            chosen.setdefault(maker, []).append(self._on[value][0])
        self.units: list[RecomputableUnit] = []
        self.unit_of: dict[int, int] = {}
        self.value_on: dict[int, str] = {self._on[value][0]: value for value in values}
        for instruction in self._lines[: self.first_late]:
            if instruction.node not in chosen:
                continue
            node = graph.by_name[instruction.node]
            for storage in chosen[node.name]:
                self.unit_of[storage] = len(self.units)
            self.units.append(
                RecomputableUnit(
                    node=node.name,
                    makes=tuple(self._on[node.name]),
                    reads=tuple(dict.fromkeys(s for i in node.inputs for s in self._on[i])),
                    touches=tuple(s for i in node.inputs for s in self._touching.get(i, ())),
                    seconds=costs.seconds(node).value,
                    flops=node.flops,
                    workspace_bytes=costs.workspace_bytes(node),
                )
            )

        self.late_reads = late_reads(graph, self._lines, self.first_late, self.unit_of)
        self._placing = CopyPlacement(
            num_lines=self.num_lines,
            units=self.units,
            unit_of=self.unit_of,
            late_first=self.late_first,
            late_reads=self.late_reads,
        )

    def _lay_out(self, costs: CostTable) -> None:
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

    def _set_scale(self, costs: CostTable) -> None:
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
        self._factor = program.repeats * costs.whole_step_in(program.parts).value
        # What the optimizer's step moves takes its room, and its pieces are resident already.
        self._far_bytes = costs.far_bytes - program.far_bytes
        self._pieces_bytes = 0 if program.is_moving else 2 * OFFLOAD_PIECE_BYTES

    def storages_of(self, values: Iterable[str]) -> frozenset[int]:
        """The choice that recomputes these values."""
        return frozenset(self._on[value][0] for value in values)

    def flops_of(self, again: frozenset[int]) -> int:
        """All the program's, with those of what runs again."""
        copies = self.copies(again)
        more = sum(self.units[u].flops for u in copies.units)
        return self.program.flops + self.program.repeats * more

    def copies(self, choice: frozenset[int]) -> Copies:
        """What it makes run again, and where."""
        return self._placing.copies(self._parted(choice)[0], self.times_of(choice))

    def _first_wanted(self) -> list[int]:
        """The late line that ends the wait of a kept value; a guess where only copies read it."""
        wanted = self.late_first.copy()
        for unit in reversed(self.units):
            line = min(wanted[s] for s in unit.makes)
            for storage in unit.reads:
                if self.late_first[storage] == NEVER:
                    wanted[storage] = min(wanted[storage], line)
        return wanted

    def count(self, choice: frozenset[int]) -> PeakEstimate:
        """What the program costs when the backward pass reads copies of these."""
        again, far, coded = self._parted(choice)
        times = self.times_of(choice)
        copies = self._placing.copies(again, times)
        codes = self._code(coded, copies) if coded else NO_CODES
        copies = codes.copies or copies
        trips = self._trips(far, copies, codes)
        held, later = self._held(again, copies, codes, trips)
        if self.program.repeats > 1:
            held = np.maximum(held, later + self.left_bytes)
        pieces = self._pieces_bytes if trips.by_storage else 0
        held = held + self.resident_bytes + pieces
        if trips.nbytes > self._far_bytes:
            held = held + NEVER  # there is no room: no limit is that high
        seconds = self.seconds_of(copies.units) + self.program.repeats * trips.seconds
        seconds += sum(self._coding_seconds(s) for s in codes.by_storage)
        moved = (self.far(s, far[s]) for s in trips.by_storage)
        return PeakEstimate(
            peak_bytes=max(self._update_bytes + pieces, int(held.max())),
            seconds=self.plain_seconds + seconds,
            active=copies.units,
            away=(*moved, *(self.coded(s) for s in codes.by_storage)),
            often=self._made_often(times, copies),
            held=held,
            shift=copies.shift,
            first=copies.first,
        )

    def lags_and_leads(self, choice: frozenset[int]) -> dict[str, tuple[int, int]]:
        """Of each value that is moved: how many operators run while it is on its way."""
        trips = self._trips_of(choice)
        return {self.far_value_on[s]: (trip.lag, trip.lead) for s, trip in trips.items()}

    def in_slices(self, choice: frozenset[int]) -> dict[str, int]:
        """Of each value that is moved and comes back in slices: in how many."""
        values = (self.far_value_on[s] for s, trip in self._trips_of(choice).items() if trip.slices)
        return {value: self.slices[value] for value in values}

    def _trips_of(self, choice: frozenset[int]) -> Mapping[int, TransferPlan]:
        again, far, coded = self._parted(choice)
        copies = self._placing.copies(again, self.times_of(choice))
        codes = self._code(coded, copies)
        return self._trips(far, codes.copies or copies, codes).by_storage

    def _trips(self, far: dict[int, TransferMode], copies: Copies, codes: Codes) -> TransferPlans:
        if not far:
            return NO_TRIPS
        assert self._roads is not None
        far = {
            # What is made again of a value reads it whole.
            s: way if s in self.sliced and s not in copies.first_read else way.whole
            for s, way in far.items()
        }
        seconds = [self.units[u].seconds for u in copies.units]
        added = [line for lines in codes.by_storage.values() for line in lines]
        takes = [
            seconds
            for s in codes.by_storage
            for seconds in (self._coders[s].encode_seconds, self._coders[s].decode_seconds)
        ]
        return self._roads.travelled(
            far,
            wanted={s: self._first_late_read(s, copies) for s in far},
            forward_last=self.forward_last,
            shift=copies.shift,
            copies=[*copies.lines, *added],
            copy_seconds=[*seconds, *takes],
            added_early=len(codes.by_storage),
        )

    def _first_late_read(self, storage: int, copies: Copies) -> int:
        line = self.late_first[storage]
        own = line if line == NEVER else line + int(copies.shift[line])
        return min(own, copies.first_read.get(storage, NEVER))

    def _code(self, coded: tuple[int, ...], copies: Copies) -> Codes:
        """Where values are written down and read back, and all lines moved by that."""
        wanted = {s: self._first_late_read(s, copies) for s in coded}
        return placed(
            [s for s in coded if wanted[s] < NEVER],
            copies,
            num_lines=self.num_lines,
            nbytes=self.nbytes,
            behind=self.forward_last,
            before=wanted,
        )

    def seconds_of(self, units: Iterable[int]) -> float:
        return self._factor * sum(self.units[u].seconds for u in units)

    def _made_often(self, times: Mapping[int, int], copies: Copies) -> tuple[int, ...]:
        made = Counter(storage for storage, _ in copies.often)
        return tuple(
            self.often(s, more) for s in times for more in range(2, 1 + min(times[s], made[s]))
        )

    def _held(
        self, again: frozenset[int], copies: Copies, codes: Codes, trips: TransferPlans
    ) -> tuple[Floats, Floats]:
        """Bytes above the resident ones at each line, copies among them: in the first micro-batch,
        and in those that add to its gradients."""
        lives = self._lives(again, copies, codes)
        slices: list[tuple[int, int, SlicedRead]] = []
        for storage, trip in trips.by_storage.items():
            lives.leave(self._row[storage], gone=trip.gone, back=None if trip.slices else trip.back)
            slices += trip.slices
        for storage, (encode, decode) in codes.by_storage.items():
            lives.leave(self._row[storage], gone=encode, back=decode)
        length = self.num_lines + len(copies.units) + 2 * len(codes.by_storage)
        workspace = self._workspace_at(copies, codes, length)
        more = np.zeros(length + 1)
        for storage, (encode, decode) in codes.by_storage.items():
            more[encode] += self._coders[storage].nbytes
            more[decode + 1] -= self._coders[storage].nbytes
        for issue, wait, nbytes in self._underway:
            more[issue + copies.shift[issue]] += nbytes
            more[wait + copies.shift[wait] + 1] -= nbytes
        for begin, end, read in slices:
            more[begin] += read.room_bytes
            more[end + 1] -= read.room_bytes
            workspace[end] += read.more_workspace

        def total(stays: NDArray[np.bool_]) -> Floats:
            summed: Floats = np.cumsum(lives.held(self._bytes, length, stays=stays) + more)
            return summed[:length] + workspace

        first = total(self._stays)
        return first, total(self._stays & ~self._gradients) if self.program.repeats > 1 else first

    def _lives(self, again: frozenset[int], copies: Copies, codes: Codes) -> Lifetimes:
        """From which line to which each storage is there, and each copy of what is made again."""
        shift, row = copies.shift, self._row
        late = np.where(self._late_last >= 0, self._late_last + shift[self._late_last], -1)
        forward_last = self._forward_last
        if codes.by_storage:
            forward_last = np.where(forward_last >= 0, forward_last + shift[forward_last], -1)
        lives = Lifetimes(
            self._born + shift[self._born], np.maximum(forward_last, late), forward_last
        )
        come = lives.come
        often, last_read = copies.often, copies.last_read
        last_late: list[int] = late.tolist()
        for number, line in zip(copies.units, copies.lines):
            for storage in self.units[number].makes:
                at, end = row[storage], line
                if storage in again:
                    end = often.get((storage, line), -1)
                    if end < 0:
                        end = max(line, last_late[at], last_read.get(storage, -1))
                come(at, line, end)
        forgotten = [row[s] for u in set(copies.units) for s in self.units[u].makes if s in again]
        lives.dies[forgotten] = forward_last[forgotten]
        for storage, line in last_read.items():
            at = row[storage]
            if storage not in again and line > lives.dies[at]:
                lives.dies[at] = line
        return lives

    def _workspace_at(self, copies: Copies, codes: Codes, length: int) -> Floats:
        workspace = np.zeros(length)
        workspace[np.arange(self.num_lines) + copies.shift] = self.workspace
        workspace[list(copies.lines)] = [self.units[u].workspace_bytes for u in copies.units]
        for storage, (encode, decode) in codes.by_storage.items():
            workspace[encode] = self._coders[storage].encode_workspace
            workspace[decode] = self._coders[storage].decode_workspace
        return workspace
