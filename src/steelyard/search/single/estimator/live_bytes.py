"""The live bytes at each line of a program with copies, codecs and transfers.

Not for placing them: see copy_placement.py and transfer_timing.py.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from steelyard.search.single.estimator.copy_placement import Codes, Copies
from steelyard.search.single.estimator.estimate import Coder, Floats, RecomputableUnit
from steelyard.search.single.estimator.lifetimes import Lifetimes
from steelyard.search.single.estimator.sliced_reads import SlicedRead
from steelyard.search.single.estimator.storage_lines import StorageLines
from steelyard.search.single.estimator.transfer_timing import TransferPlans


class LiveBytes:
    """The lifetimes of a plain program, as arrays over the storages that it makes.

    ``workspace`` are the bytes that each line needs while it runs. ``exchange_buffers`` are the
    first line, the last line and the bytes of each buffer of an exchange. The storages in
    ``persistent`` live to the end of the step; of these, later micro-batches add to the
    ``gradients``.
    """

    def __init__(
        self,
        storages: StorageLines,
        *,
        workspace: Floats,
        exchange_buffers: Sequence[tuple[int, int, int]],
        persistent: frozenset[int],
        gradients: frozenset[int],
        is_repeated: bool,
        units: Sequence[RecomputableUnit],
        codecs: Mapping[int, Coder],
    ) -> None:
        produced = storages.produced
        self._bytes = np.array([storages.nbytes[s] for s in produced], dtype=np.float64)
        self._born = np.array([storages.born[s] for s in produced], dtype=np.int64)
        self._forward_last = np.array([storages.forward_last[s] for s in produced], dtype=np.int64)
        self._backward_last = np.array(
            [storages.backward_last[s] for s in produced], dtype=np.int64
        )
        self._row = {s: row for row, s in enumerate(produced)}
        self._workspace = workspace
        self._exchange_buffers = exchange_buffers
        self._is_persistent = np.array([s in persistent for s in produced], dtype=bool)
        self._is_gradient = np.array([s in gradients for s in produced], dtype=bool)
        self._is_repeated = is_repeated
        self._units, self._codecs = units, codecs

    def by_line(
        self, recomputed: frozenset[int], copies: Copies, codes: Codes, transfers: TransferPlans
    ) -> tuple[Floats, Floats]:
        """Return the bytes, beyond the resident ones, at each line including copies.

        The first array is for the first micro-batch, the second for the later ones, which add to
        its gradients.
        """
        lifetimes = self._lifetimes(recomputed, copies, codes)
        slices: list[tuple[int, int, SlicedRead]] = []
        for storage, transfer in transfers.by_storage.items():
            lifetimes.evict(
                self._row[storage],
                evicted_at=transfer.evicted_at,
                restored_at=None if transfer.slices else transfer.restored_at,
            )
            slices += transfer.slices
        for storage, (encode, decode) in codes.by_storage.items():
            lifetimes.evict(self._row[storage], evicted_at=encode, restored_at=decode)
        length = len(self._workspace) + len(copies.units) + 2 * len(codes.by_storage)
        workspace = self._workspace_by_line(copies, codes, length)
        changes = np.zeros(length + 1)
        for storage, (encode, decode) in codes.by_storage.items():
            changes[encode] += self._codecs[storage].nbytes
            changes[decode + 1] -= self._codecs[storage].nbytes
        for issue, wait, nbytes in self._exchange_buffers:
            changes[issue + copies.shift[issue]] += nbytes
            changes[wait + copies.shift[wait] + 1] -= nbytes
        for begin, end, read in slices:
            changes[begin] += read.room_bytes
            changes[end + 1] -= read.room_bytes
            workspace[end] += read.more_workspace

        def total(persistent: NDArray[np.bool_]) -> Floats:
            summed: Floats = np.cumsum(
                lifetimes.byte_changes(self._bytes, length, persistent=persistent) + changes
            )
            return summed[:length] + workspace

        first = total(self._is_persistent)
        return first, total(
            self._is_persistent & ~self._is_gradient
        ) if self._is_repeated else first

    def _lifetimes(self, recomputed: frozenset[int], copies: Copies, codes: Codes) -> Lifetimes:
        """Return the line intervals of all storages and of all recomputed copies."""
        shift, row = copies.shift, self._row
        backward_last = np.where(
            self._backward_last >= 0, self._backward_last + shift[self._backward_last], -1
        )
        forward_last = self._forward_last
        if codes.by_storage:
            forward_last = np.where(forward_last >= 0, forward_last + shift[forward_last], -1)
        lifetimes = Lifetimes(
            self._born + shift[self._born], np.maximum(forward_last, backward_last), forward_last
        )
        add_copy = lifetimes.add_copy
        repeated_last_read, last_read = copies.repeated_last_read, copies.last_read
        backward_end: list[int] = backward_last.tolist()
        for number, line in zip(copies.units, copies.lines):
            for storage in self._units[number].makes:
                at, end = row[storage], line
                if storage in recomputed:
                    end = repeated_last_read.get((storage, line), -1)
                    if end < 0:
                        end = max(line, backward_end[at], last_read.get(storage, -1))
                add_copy(at, line, end)
        dropped = [
            row[s] for u in set(copies.units) for s in self._units[u].makes if s in recomputed
        ]
        lifetimes.dies[dropped] = forward_last[dropped]
        for storage, line in last_read.items():
            at = row[storage]
            if storage not in recomputed and line > lifetimes.dies[at]:
                lifetimes.dies[at] = line
        return lifetimes

    def _workspace_by_line(self, copies: Copies, codes: Codes, length: int) -> Floats:
        workspace = np.zeros(length)
        workspace[np.arange(len(self._workspace)) + copies.shift] = self._workspace
        workspace[list(copies.lines)] = [self._units[u].workspace_bytes for u in copies.units]
        for storage, (encode, decode) in codes.by_storage.items():
            workspace[encode] = self._codecs[storage].encode_workspace
            workspace[decode] = self._codecs[storage].decode_workspace
        return workspace
