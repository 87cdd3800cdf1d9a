"""Offloaded weights and gradients: live tensors at all times, memory-mapped on the offload file.

Between steps they can be read and written through the page cache, which the system may evict at any
time. A step fetches copies and sends them back with direct I/O, which bypasses that cache. The
program determines which tensors are transferred, and when.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
from torch import nn

from steelyard.ir.optimizer_update import GRADIENT, WEIGHT
from steelyard.offload.location import OffloadedLayout, TensorLocation
from steelyard.offload.sliced_gradients import OffloadedGradients
from steelyard.offload.sliced_matmul import OffloadedMatrix, SlicedMatmuls
from steelyard.offload.tier import OffloadFile


class OffloadedTensors:
    """Offloaded weights and gradients. ``places`` maps a name in the program to its parameter and
    its offset in offload memory.
    """

    def __init__(
        self, places: Mapping[str, tuple[nn.Parameter, int]], *, memory: OffloadFile
    ) -> None:
        self._memory = memory
        self._locations: dict[str, TensorLocation] = {}
        for name, (parameter, offset) in places.items():
            pages = memory.mapped(offset, parameter.nbytes)
            offloaded = OffloadedLayout.of(parameter).on(pages)
            self._locations[name] = TensorLocation(
                parameter=parameter, offset=offset, pages=pages, offloaded=offloaded
            )
        self._weights = [
            location for name, location in self._locations.items() if name.startswith(WEIGHT)
        ]
        self._arriving: dict[str, tuple[Future[None], torch.Tensor]] = {}
        # Keeps each tensor together with its transfer. If the sending thread dropped the last
        # reference, that thread would free the memory, and the memory measurement would not see
        # this.
        self.leaving: dict[str, tuple[Future[None], torch.Tensor]] = {}
        self.products = SlicedMatmuls(memory)
        self.gradients = OffloadedGradients(memory)
        self._accepted: set[str] = set()
        self._resident_gradients: set[str] = set()
        self.calls: Mapping[str, Callable[[str], None]] = {
            "fetch": self._fetch, "fetched": self._fetched, "send": self._send, "sent": self._sent
        }  # fmt: skip
        self.offload_all()

    def begin(self) -> None:
        """Prepare a step or an update: drop transfers that a failed one has left pending."""
        for unfinished in (self._arriving, self.leaving, self._accepted, self._resident_gradients):
            unfinished.clear()
        self.products.clear()
        self.gradients.clear()
        self.offload_all()

    def offload_all(self) -> None:
        """Send all weights whose data has been replaced since the last call; at first these are all
        weights.
        """
        for location in self._weights:
            if not location.is_offloaded(location.parameter):
                resident = location.parameter.data
                self._memory.await_sent(self._memory.send(location.offset, resident))
                location.parameter.data = location.set_layout(resident)

    def location(self, name: str) -> TensorLocation:
        return self._locations[name]

    def holds(self, x: torch.Tensor) -> bool:
        """Return True if ``x`` is in offload memory."""
        return any(location.is_offloaded(x) for location in self._locations.values())

    # --- calls of a forward or backward pass

    def fetch_weight(self, name: str) -> torch.Tensor:
        location = self._locations[name]
        x = OffloadedLayout.of(location.offloaded).empty()
        self._arriving[name] = self._memory.fetch(location.offset, x), x
        return x

    def fetched_weight(self, name: str, x: torch.Tensor) -> torch.Tensor:
        transfer, _ = self._arriving.pop(name)
        self._memory.await_fetched(transfer)
        return x

    def sink(self, parameter: nn.Parameter) -> Callable[[torch.Tensor], None] | None:
        """Return the sink of a parameter's gradient if the gradient is offloaded. Gradients of
        parameters with hooks do not use it.
        """
        for name, location in self._locations.items():
            if location.parameter is parameter and not name.startswith(WEIGHT):
                return lambda _: self._accepted.add(name)
        return None

    def fetch_gradient(self, name: str) -> torch.Tensor | None:
        """Begin to fetch the gradient; None if there is no offloaded one yet."""
        location = self._locations[name]
        if not location.is_offloaded(location.parameter.grad):
            return None
        return self.fetch_weight(name)

    def fetched_gradient(self, name: str, x: torch.Tensor | None) -> torch.Tensor | None:
        return x if x is None else self.fetched_weight(name, x)

    def send_gradient(
        self, name: str, value: torch.Tensor, before: torch.Tensor | None = None
    ) -> None:
        """Store a gradient as autograd does at a leaf: the first one is assigned, later ones are
        added to it.
        """
        if name not in self._accepted:
            return
        self._accepted.remove(name)
        location = self._locations[name]
        current = location.parameter.grad
        if current is not None and not location.is_offloaded(current):
            current.add_(value)
            return
        if current is not None:
            if before is None:
                before = self.fetched_weight(name, self.fetch_weight(name))
            value = before.add_(value)
        self.leaving[name] = self._memory.send(location.offset, value), value
        location.parameter.grad = location.set_layout(value)

    def sent_gradient(self, name: str, _: None, value: object) -> None:  # noqa: ARG002
        if name in self.leaving:
            self._sent(name)

    # --- a weight that is read in slices

    def begin_weight(self, name: str, parts: int) -> torch.Tensor:
        location = self._locations[name]
        rows, columns = location.offloaded.shape
        offloaded = OffloadedMatrix(
            offset=location.offset, rows=rows, columns=columns, dtype=location.offloaded.dtype
        )
        return self.products.begin(name, offloaded, parts)

    def end_weight(self, name: str, _: torch.Tensor) -> None:
        self.products.end(name)

    # --- a gradient that is computed in slices

    def begin_gradient(self, name: str, parts: int) -> torch.Tensor:
        return self.gradients.begin(name, self._locations[name], parts)

    def leave_gradient(self, name: str) -> None:
        """Do nothing: the slices are sent as they are computed."""

    def arrived_gradient(self, name: str, room: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return the buffer: the slices were fetched when they were added to."""
        return room

    def end_gradient(self, name: str, *_: object) -> None:
        self.gradients.end(name)

    # --- calls of an update, for which a parameter and its gradient are resident

    def _fetch(self, name: str) -> None:
        location = self._locations[name]
        if name.startswith(WEIGHT) or location.is_offloaded(location.parameter.grad):
            self.fetch_weight(name)

    def _fetched(self, name: str) -> None:
        if name not in self._arriving:
            return
        parameter, (_, x) = self._locations[name].parameter, self._arriving[name]
        self.fetched_weight(name, x)
        if name.startswith(WEIGHT):
            parameter.data = x
        else:
            parameter.grad = x
            self._resident_gradients.add(name)

    def updated(self, parameter: str) -> None:
        """Restore the offloaded gradient after an update, which only read its copy."""
        name = GRADIENT + parameter
        if name in self._resident_gradients:
            self._resident_gradients.remove(name)
            self._locations[name].parameter.grad = self._locations[name].offloaded

    def _send(self, name: str) -> None:
        location, resident = self._locations[name], self._locations[name].parameter.data
        self.leaving[name] = self._memory.send(location.offset, resident), resident
        location.parameter.data = location.set_layout(resident)

    def _sent(self, name: str) -> None:
        self._memory.await_sent(self.leaving[name][0])
        del self.leaving[name]
