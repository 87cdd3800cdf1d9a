"""Estimates the peak bytes and seconds of a set of choices without rewriting the program.

The search uses it as a surrogate: it mirrors what the trades write and what predict/ computes,
about thirty times as fast. Tests verify that the two are equal. Not for reported numbers: every
plan that is returned has been rewritten and predicted in full.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT, OFFLOAD_PIECE_BYTES
from steelyard.ir.graph import OutputKind, Phase
from steelyard.ir.program import Program
from steelyard.passes.recompute_copies import late_reads
from steelyard.predict import peak_bytes, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.predict.liveness import held_underway
from steelyard.search.single.estimator.copy_placement import (
    NEVER,
    NO_CODES,
    Codes,
    Copies,
    CopyPlacement,
    placed,
)
from steelyard.search.single.estimator.estimate import Coder, Floats, PeakEstimate, RecomputableUnit
from steelyard.search.single.estimator.live_bytes import LiveBytes
from steelyard.search.single.estimator.sliced_reads import SlicedRead, sliced_reads
from steelyard.search.single.estimator.storage_lines import StorageLines
from steelyard.search.single.estimator.transfer_timing import (
    NO_TRANSFERS,
    TransferLinks,
    TransferMode,
    TransferPlan,
    TransferPlans,
)

_UNHIDDEN_SHARE = 0.1
# Choices are numbered in this order: all storages to recompute, then those to offload in each mode,
# then those to keep in 8 bits, then those to recompute twice, three times, and so on.
_QUANTIZE_BLOCK = 1 + len(TransferMode)


class FastEstimator:
    """A program without copies, prepared for fast estimates; a choice is an integer.

    A forward value is identified by its storage. The number of the storage is also the choice to
    recompute the value. ``repeat_choice`` is an additional choice to recompute it more than once,
    ``offload_choice`` moves it to offload memory and back, and ``quantize_choice`` keeps it in 8
    bits.

    Lines are the computed instructions of the plain program, numbered. A copy is placed just before
    the line of the backward pass that first needs it. ``slices`` maps offloadable values that may
    be fetched in slices to their number of slices.
    """

    def __init__(
        self,
        program: Program,
        costs: CostTable,
        values: Iterable[str],
        offloadable: Iterable[str] = (),
        quantizable: Iterable[str] = (),
        slices: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        assert not program.recomputed
        self.program = program
        self._lines = [i for i in program.instructions if i.sink is None]
        backward = (i for i, ins in enumerate(self._lines) if ins.phase is Phase.BACKWARD)
        self.backward_start = next(backward, len(self._lines))
        buffers = held_underway(replace(program, instructions=tuple(self._lines)))
        exchange_buffers = [
            (e.issue, e.wait, nbytes) for e, nbytes in buffers if e.wait is not None
        ]
        lines = StorageLines(program, self._lines, self.backward_start)
        self.nbytes, self.born, self.storages = lines.nbytes, lines.born, lines.produced
        self.forward_last = lines.forward_last
        self.backward_first, self.backward_last = lines.backward_first, lines.backward_last
        self._storages_by_node = lines.by_node
        self._read_units(values, costs, lines.updates_by_reader)
        self.workspace = np.array(
            [costs.workspace_bytes(program.graph.by_name[i.node]) for i in self._lines],
            dtype=np.float64,
        )
        self.gradients = frozenset(
            s
            for o in program.graph.outputs
            if o.kind is OutputKind.GRADIENT
            for s in lines.by_node[o.node]
        )
        loss = frozenset(lines.by_node[program.loss] if program.loss else ())
        self.persistent = self.gradients | loss
        self._set_scale(costs)
        self.needed_at = self._find_needed_lines()
        self.offloadable: dict[int, str] = {}
        self.slices = slices
        self.min_workspace = self.workspace.copy()
        self.slicing_gain_seconds = 0.0
        self.sliced: Mapping[int, Sequence[SlicedRead]] = {}
        self._links = None
        if OFFLOAD_OUT in costs.links and OFFLOAD_IN in costs.links:
            self.offloadable = {self._storages_by_node[value][0]: value for value in offloadable}
            reads = sliced_reads(program, self._lines, slices, costs)
            self.sliced = {
                self._storages_by_node[value][0]: sliced_reads_of_value
                for value, sliced_reads_of_value in reads.items()
            }
            for read in (
                read for sliced_reads_of_value in reads.values() for read in sliced_reads_of_value
            ):
                self.min_workspace[read.line] += min(0, read.more_workspace)
                self.slicing_gain_seconds += self._factor * max(0.0, -read.more_seconds)
            self._links = TransferLinks(self._lines, program, costs, self.offloadable, self.sliced)
        self.quantizable = {self._storages_by_node[value][0]: value for value in quantizable}
        self._codecs = {
            s: Coder.of(program.graph, value, costs) for s, value in self.quantizable.items()
        }
        self._live_bytes = LiveBytes(
            lines,
            workspace=self.workspace,
            exchange_buffers=exchange_buffers,
            persistent=self.persistent,
            gradients=self.gradients - loss,
            is_repeated=program.repeats > 1,
            units=self.units,
            codecs=self._codecs,
        )

    @property
    def num_lines(self) -> int:
        return len(self._lines)

    def offload_choice(self, storage: int, mode: TransferMode) -> int:
        """Return the choice to offload the value on this storage."""
        return len(self.nbytes) * (1 + mode) + storage

    def quantize_choice(self, storage: int) -> int:
        """Return the choice to keep the value on this storage in 8 bits."""
        return len(self.nbytes) * _QUANTIZE_BLOCK + storage

    def repeat_choice(self, storage: int, times: int) -> int:
        """Return the choice to recompute the value on this storage at most this many times."""
        return len(self.nbytes) * (_QUANTIZE_BLOCK + times - 1) + storage

    def storage(self, choice: int) -> int:
        return choice % len(self.nbytes)

    def mode(self, choice: int) -> TransferMode:
        """Return the transfer mode of an offload choice."""
        return TransferMode(choice // len(self.nbytes) - 1)

    def is_recompute(self, choice: int) -> bool:
        return choice < len(self.nbytes)

    def is_repeat(self, choice: int) -> bool:
        return choice // len(self.nbytes) > _QUANTIZE_BLOCK

    def times(self, choice: int) -> int:
        """Return the maximum number of recomputations of a repeat choice."""
        return choice // len(self.nbytes) - _QUANTIZE_BLOCK + 1

    def required_choice(self, choice: int) -> int:
        """Return the choice that a repeat choice requires: one recomputation less."""
        return self.storage(choice) if self.times(choice) == 2 else choice - len(self.nbytes)

    def is_offload(self, choice: int) -> bool:
        return 1 <= choice // len(self.nbytes) < _QUANTIZE_BLOCK

    def is_quantize(self, choice: int) -> bool:
        return choice // len(self.nbytes) == _QUANTIZE_BLOCK

    def unsliced(self, choices: Iterable[int]) -> frozenset[int]:
        """Return the same choices with whole fetches instead of sliced ones."""
        return frozenset(
            self.offload_choice(self.storage(c), self.mode(c).unsliced) if self.is_offload(c) else c
            for c in choices
        )

    def evicted_value(self, choice: int) -> str:
        """Return the value that this choice offloads or keeps in 8 bits."""
        values = self.quantizable if self.is_quantize(choice) else self.offloadable
        return values[self.storage(choice)]

    def eviction_choices(self) -> list[int]:
        """Return all choices to offload a value or to keep it in 8 bits."""
        offloads = [
            self.offload_choice(s, mode)
            for mode in TransferMode
            for s in (self.sliced if mode.is_sliced else self.offloadable)
        ]
        return offloads + [self.quantize_choice(s) for s in self.quantizable]

    def transfer_seconds(self, storages: Iterable[int], *, share: float = 1.0) -> Floats:
        """Return a share of the seconds to send and fetch each storage.

        The seconds are infinite for a storage that cannot be offloaded.
        """
        assert self._links is not None
        links, offloadable = self._links, self.offloadable
        return np.array(
            [share * links.seconds_of(s) if s in offloadable else np.inf for s in storages]
        )

    def standalone_seconds(self, choices: Collection[int]) -> float:
        """Return the seconds of these choices if nothing overlapped with them.

        Only a share of each transfer counts, because most of it overlaps with computation.
        """
        recomputed, offloaded, quantized = self._split_by_trade(choices)
        seconds = self.seconds_of({self.unit_of[s] for s in recomputed})
        seconds += sum(self._codec_seconds(s) for s in quantized)
        repeated = (self.storage(c) for c in choices if self.is_repeat(c))
        seconds += self.seconds_of(self.unit_of[s] for s in repeated)
        if self._links is not None:
            seconds += _UNHIDDEN_SHARE * sum(self._links.seconds_of(s) for s in offloaded)
        return seconds

    def quantization_costs(self, storages: Iterable[int]) -> tuple[Floats, Floats]:
        """Return the codec seconds for each storage, and the share of its bytes that is left when
        encoded.

        The seconds are those to encode and decode, infinite for a storage that cannot be
        quantized.
        """
        ordered = list(storages)
        seconds = [self._codec_seconds(s) if s in self._codecs else np.inf for s in ordered]
        shares = [
            self._codecs[s].nbytes / self.nbytes[s] if s in self._codecs else 1.0 for s in ordered
        ]
        return np.array(seconds), np.array(shares)

    def _codec_seconds(self, storage: int) -> float:
        return self._factor * self._codecs[storage].seconds

    def _split_by_trade(
        self, choices: Collection[int]
    ) -> tuple[frozenset[int], dict[int, TransferMode], tuple[int, ...]]:
        """Return the storages to recompute, to offload with their modes, and to keep in 8 bits.

        Each value gets one trade: recompute takes precedence over quantize, and quantize over
        offload.
        """
        count = len(self.nbytes)
        if max(choices, default=0) < count:
            return frozenset(choices), {}, ()
        ordered = sorted(choices)
        recomputed = frozenset(c for c in ordered if c < count)
        quantized = tuple(
            c % count for c in ordered if self.is_quantize(c) and c % count not in recomputed
        )
        offloaded = {c % count: self.mode(c) for c in ordered if self.is_offload(c)}
        assigned = recomputed.union(quantized)
        return (
            recomputed,
            {s: mode for s, mode in offloaded.items() if s not in assigned},
            quantized,
        )

    def times_of(self, choices: Collection[int]) -> dict[int, int]:
        """Map each storage that is recomputed repeatedly to its maximum number of
        recomputations.
        """
        first_repeat = self.repeat_choice(0, 2)
        if max(choices, default=0) < first_repeat:
            return {}
        repeats = sorted(choice for choice in choices if choice >= first_repeat)
        return {self.storage(choice): self.times(choice) for choice in repeats}

    def _read_units(
        self,
        values: Iterable[str],
        costs: CostTable,
        updates_by_reader: Mapping[str, Sequence[int]],
    ) -> None:
        graph = self.program.graph
        chosen: dict[str, list[int]] = {}
        for value in values:
            node = graph.by_name[value]
            producer = node.inputs[0] if node.is_getitem else value
            chosen.setdefault(producer, []).append(self._storages_by_node[value][0])
        self.units: list[RecomputableUnit] = []
        self.unit_of: dict[int, int] = {}
        self.value_on: dict[int, str] = {
            self._storages_by_node[value][0]: value for value in values
        }
        for instruction in self._lines[: self.backward_start]:
            if instruction.node not in chosen:
                continue
            node = graph.by_name[instruction.node]
            for storage in chosen[node.name]:
                self.unit_of[storage] = len(self.units)
            self.units.append(
                RecomputableUnit(
                    node=node.name,
                    makes=tuple(self._storages_by_node[node.name]),
                    reads=tuple(
                        dict.fromkeys(s for i in node.inputs for s in self._storages_by_node[i])
                    ),
                    touches=tuple(s for i in node.inputs for s in updates_by_reader.get(i, ())),
                    seconds=costs.seconds(node).value,
                    flops=node.flops,
                    workspace_bytes=costs.workspace_bytes(node),
                )
            )

        self.backward_reads = late_reads(graph, self._lines, self.backward_start, self.unit_of)
        self._placement = CopyPlacement(
            num_lines=self.num_lines,
            units=self.units,
            unit_of=self.unit_of,
            backward_first=self.backward_first,
            backward_reads=self.backward_reads,
        )

    def _set_scale(self, costs: CostTable) -> None:
        """Compute the resident bytes, the optimizer step and the fixed seconds with predict/."""
        program = self.program
        update_only = replace(program, instructions=())
        resting = update_only
        if program.update is not None:
            resting = replace(update_only, update=replace(program.update, instructions=()))
        self.resident_bytes = peak_bytes(resting, costs)
        self.persistent_bytes = sum(self.nbytes[s] for s in self.storages if s in self.persistent)
        self._update_bytes = peak_bytes(update_only, costs) + self.persistent_bytes
        self.plain_seconds = step_seconds(program, costs).value
        self._factor = program.repeats * costs.whole_step_in(program.parts).value
        # The tensors that the optimizer's step offloads take part of the offload memory, and its
        # transfer buffers are already resident.
        self._offload_bytes = costs.offload_bytes - program.offload_bytes
        self._pieces_bytes = 0 if program.is_moving else 2 * OFFLOAD_PIECE_BYTES

    def is_calibrated_as(self, costs: CostTable) -> bool:
        """True if ``costs`` still have the calibration of this program that the estimates use."""
        program = self.program
        return self._factor == program.repeats * costs.whole_step_in(program.parts).value

    def storages_of(self, values: Iterable[str]) -> frozenset[int]:
        """Return the choices that recompute these values."""
        return frozenset(self._storages_by_node[value][0] for value in values)

    def flops_of(self, choices: frozenset[int]) -> int:
        """Return the FLOPs of the program, including recomputed operators."""
        copies = self.copies(choices)
        more = sum(self.units[u].flops for u in copies.units)
        return self.program.flops + self.program.repeats * more

    def copies(self, choice: frozenset[int]) -> Copies:
        """Return the operators that these choices recompute, and their lines."""
        return self._placement.copies(self._split_by_trade(choice)[0], self.times_of(choice))

    def _find_needed_lines(self) -> list[int]:
        """Return the line that ends the idle gap of each saved value.

        For a value that only copies read, the line is a guess.
        """
        needed_at = self.backward_first.copy()
        for unit in reversed(self.units):
            line = min(needed_at[s] for s in unit.makes)
            for storage in unit.reads:
                if self.backward_first[storage] == NEVER:
                    needed_at[storage] = min(needed_at[storage], line)
        return needed_at

    def estimate(self, choice: frozenset[int]) -> PeakEstimate:
        """Return the peak bytes and seconds of the program with these choices applied."""
        recomputed, offloaded, quantized = self._split_by_trade(choice)
        times = self.times_of(choice)
        copies = self._placement.copies(recomputed, times)
        codes = self._place_codecs(quantized, copies) if quantized else NO_CODES
        copies = codes.copies or copies
        transfers = self._transfer_plans(offloaded, copies, codes)
        live_bytes, later_bytes = self._live_bytes.by_line(recomputed, copies, codes, transfers)
        if self.program.repeats > 1:
            live_bytes = np.maximum(live_bytes, later_bytes + self.persistent_bytes)
        pieces = self._pieces_bytes if transfers.by_storage else 0
        live_bytes = live_bytes + self.resident_bytes + pieces
        if transfers.nbytes > self._offload_bytes:
            # the offload memory is too small, so exceed every limit
            live_bytes = live_bytes + NEVER
        seconds = self.seconds_of(copies.units) + self.program.repeats * transfers.seconds
        seconds += sum(self._codec_seconds(s) for s in codes.by_storage)
        offload_choices = (self.offload_choice(s, offloaded[s]) for s in transfers.by_storage)
        return PeakEstimate(
            peak_bytes=max(self._update_bytes + pieces, int(live_bytes.max())),
            seconds=self.plain_seconds + seconds,
            active=copies.units,
            evicted=(*offload_choices, *(self.quantize_choice(s) for s in codes.by_storage)),
            repeated=self._repeated_choices(times, copies),
            live_bytes=live_bytes,
            shift=copies.shift,
            first_needed=copies.first_needed,
        )

    def lags_and_leads(self, choice: frozenset[int]) -> dict[str, tuple[int, int]]:
        """Return the lag and lead of each offloaded value: how many operators its transfers overlap
        with.
        """
        transfers = self._transfers_of(choice)
        return {
            self.offloadable[s]: (transfer.lag, transfer.lead) for s, transfer in transfers.items()
        }

    def slice_counts(self, choice: frozenset[int]) -> dict[str, int]:
        """Return the number of slices of each offloaded value that is fetched in slices."""
        values = (
            self.offloadable[s]
            for s, transfer in self._transfers_of(choice).items()
            if transfer.slices
        )
        return {value: self.slices[value] for value in values}

    def _transfers_of(self, choice: frozenset[int]) -> Mapping[int, TransferPlan]:
        recomputed, offloaded, quantized = self._split_by_trade(choice)
        copies = self._placement.copies(recomputed, self.times_of(choice))
        codes = self._place_codecs(quantized, copies)
        return self._transfer_plans(offloaded, codes.copies or copies, codes).by_storage

    def _transfer_plans(
        self, offloaded: dict[int, TransferMode], copies: Copies, codes: Codes
    ) -> TransferPlans:
        if not offloaded:
            return NO_TRANSFERS
        assert self._links is not None
        offloaded = {
            # A recomputed operator reads the whole value.
            s: mode if s in self.sliced and s not in copies.first_read else mode.unsliced
            for s, mode in offloaded.items()
        }
        seconds = [self.units[u].seconds for u in copies.units]
        codec_lines = [line for lines in codes.by_storage.values() for line in lines]
        codec_seconds = [
            seconds
            for s in codes.by_storage
            for seconds in (self._codecs[s].encode_seconds, self._codecs[s].decode_seconds)
        ]
        return self._links.schedule(
            offloaded,
            needed_at={s: self._first_backward_read(s, copies) for s in offloaded},
            forward_last=self.forward_last,
            shift=copies.shift,
            copies=[*copies.lines, *codec_lines],
            copy_seconds=[*seconds, *codec_seconds],
            added_early=len(codes.by_storage),
        )

    def _first_backward_read(self, storage: int, copies: Copies) -> int:
        line = self.backward_first[storage]
        own = line if line == NEVER else line + int(copies.shift[line])
        return min(own, copies.first_read.get(storage, NEVER))

    def _place_codecs(self, quantized: tuple[int, ...], copies: Copies) -> Codes:
        """Insert the lines that encode and decode values, and shift all other lines."""
        needed_at = {s: self._first_backward_read(s, copies) for s in quantized}
        return placed(
            [s for s in quantized if needed_at[s] < NEVER],
            copies,
            num_lines=self.num_lines,
            nbytes=self.nbytes,
            after_line=self.forward_last,
            before_line=needed_at,
        )

    def seconds_of(self, units: Iterable[int]) -> float:
        return self._factor * sum(self.units[u].seconds for u in units)

    def _repeated_choices(self, times: Mapping[int, int], copies: Copies) -> tuple[int, ...]:
        num_copies = Counter(storage for storage, _ in copies.repeated_last_read)
        return tuple(
            self.repeat_choice(s, more)
            for s in times
            for more in range(2, 1 + min(times[s], num_copies[s]))
        )
