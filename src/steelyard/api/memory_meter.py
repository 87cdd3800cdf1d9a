"""The measured memory of a live step: the bytes resident between calls, and the peak of a call.

Not for its predicted memory: see predict/. Not for the passes of a user's loop: see user_loop.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from steelyard import _torch
from steelyard.hardware.cluster import OFFLOAD_PIECE_BYTES
from steelyard.measure.operators.memory import is_profiled, meter_once
from steelyard.run.step import LiveStep
from steelyard.units import format_bytes


class MemoryMeter:
    """Measures the memory of a live step, and counts the steps that could not be metered.

    ``constants`` are other tensors that the captured code reads; ``batch_bytes`` is the size of the
    planned batch. ``moves_pieces`` is True if values are moved to offload memory through buffers.
    """

    def __init__(
        self,
        live: LiveStep,
        *,
        device: torch.device,
        constants: Sequence[torch.Tensor],
        batch_bytes: int,
        moves_pieces: bool,
        on_note: Callable[[str], None],
    ) -> None:
        self._live, self._device, self._constants = live, device, constants
        self._other_bytes = batch_bytes + (2 * OFFLOAD_PIECE_BYTES if moves_pieces else 0)
        self._on_note = on_note
        # Number of steps that were not metered because a profiler was active, or because the batch
        # had another shape.
        self._num_profiled = self._num_other_shapes = 0

    def may_meter(self, batch: Any) -> bool:
        """True if the batch has the planned shape and no profiler is active.

        Metering would take events from a profiler.
        """
        if not self._live.is_planned(batch):
            self._num_other_shapes += 1
            return False
        if is_profiled(self._device):
            self._num_profiled += 1
            return False
        return True

    def peak_bytes(self, call: Any) -> int:
        """Return the peak bytes of ``call``.

        These are the resident bytes, the bytes that the call adds in the allocator, and the buffers
        for transfers to offload memory.
        """
        resident = self.resident_bytes()
        metered = meter_once(call, device=self._device)
        if not metered.is_clean:
            self._on_note(
                f"the metered step freed {format_bytes(metered.freed_bytes)} from before it; "
                "its measured memory may be that much too high"
            )
        return resident + metered.peak_bytes

    def resident_bytes(self) -> int:
        """Return the bytes that are resident for a whole step, as the plan counts them."""
        return resident_bytes(self._live, self._constants) + self._other_bytes

    def notes(self, *, is_metered: bool) -> tuple[str, ...]:
        """Return a note on why no step was metered, if one could have been."""
        reasons = []
        if self._num_profiled:
            reasons.append(
                f"a profiler was active in {self._num_profiled} of them, and metering a step would "
                "have taken its events"
            )
        if self._num_other_shapes:
            reasons.append(
                f"{self._num_other_shapes} had another batch shape or another gradient codec"
            )
        if is_metered or not reasons:
            return ()
        return (f"no step's memory was measured: {'; '.join(reasons)}",)


def resident_bytes(live: LiveStep, constants: Sequence[torch.Tensor] = ()) -> int:
    """Return the bytes of the storages that outlive a step.

    These hold weights, buffers, optimizer state, other tensors that the code reads, message buffers
    shared with other ranks, and gradients kept from earlier steps.
    """
    tensors = [*live.model.parameters(), *live.model.buffers(), *live.gradients(), *constants]
    tensors += live.residuals.tensors
    if live.optimizer is not None:
        for state in live.optimizer.state.values():
            tensors += [v for v in state.values() if isinstance(v, torch.Tensor)]
    if live.states is not None:
        tensors = [t for t in tensors if not live.states.tensors.holds(t)]
    storages = {_torch.storage_key(t): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) + live.shared_bytes
