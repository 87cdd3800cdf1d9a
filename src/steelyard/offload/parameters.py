"""Weights and gradients in offload memory: live tensors all the while, that lie on its file.

Whoever reads or writes one between steps finds it, through the page cache, which the system may
empty at any time. A step fetches copies and sends them back past that cache. Not for which, nor
when: that is the program's.
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
    """``places`` has each, by its name in the program, with its parameter and its offset."""

    def __init__(
        self, places: Mapping[str, tuple[nn.Parameter, int]], *, memory: OffloadFile
    ) -> None:
        self._memory = memory
        self._homes: dict[str, TensorLocation] = {}
        for name, (parameter, offset) in places.items():
            pages = memory.mapped(offset, parameter.nbytes)
            there = OffloadedLayout.of(parameter).on(pages)
            self._homes[name] = TensorLocation(
                parameter=parameter, offset=offset, pages=pages, there=there
            )
        self._weights = [home for name, home in self._homes.items() if name.startswith(WEIGHT)]
        self._arriving: dict[str, tuple[Future[None], torch.Tensor]] = {}
        # With what is sent: the last to let go of it must not be the thread that sends it, where
        # nobody sees memory come free.
        self.leaving: dict[str, tuple[Future[None], torch.Tensor]] = {}
        self.products = SlicedMatmuls(memory)
        self.gradients = OffloadedGradients(memory)
        self._taken: set[str] = set()
        self._near: set[str] = set()
        self.calls: Mapping[str, Callable[[str], None]] = {
            "fetch": self._fetch, "fetched": self._fetched, "send": self._send, "sent": self._sent
        }  # fmt: skip
        self.put_away()

    def begin(self) -> None:
        """Before a step or an update: nothing is left under way by one that failed."""
        for unfinished in (self._arriving, self.leaving, self._taken, self._near):
            unfinished.clear()
        self.products.clear()
        self.gradients.clear()
        self.put_away()

    def put_away(self) -> None:
        """Weights that were given other memory meanwhile, as at first all were."""
        for home in self._weights:
            if not home.is_home(home.parameter):
                near = home.parameter.data
                self._memory.await_sent(self._memory.send(home.offset, near))
                home.parameter.data = home.lay_out(near)

    def home(self, name: str) -> TensorLocation:
        return self._homes[name]

    def holds(self, x: torch.Tensor) -> bool:
        """Whether it lies in offload memory."""
        return any(home.is_home(x) for home in self._homes.values())

    # --- calls of a pass

    def fetch_weight(self, name: str) -> torch.Tensor:
        home = self._homes[name]
        x = OffloadedLayout.of(home.there).empty()
        self._arriving[name] = self._memory.fetch(home.offset, x), x
        return x

    def fetched_weight(self, name: str, x: torch.Tensor) -> torch.Tensor:
        transfer, _ = self._arriving.pop(name)
        self._memory.await_fetched(transfer)
        return x

    def sink(self, parameter: nn.Parameter) -> Callable[[torch.Tensor], None] | None:
        """Where its gradient goes, if that is to be sent; a hook's gradient never comes here."""
        for name, home in self._homes.items():
            if home.parameter is parameter and not name.startswith(WEIGHT):
                return lambda _: self._taken.add(name)
        return None

    def fetch_gradient(self, name: str) -> torch.Tensor | None:
        """None where there is none yet."""
        home = self._homes[name]
        if not home.is_home(home.parameter.grad):
            return None
        return self.fetch_weight(name)

    def fetched_gradient(self, name: str, x: torch.Tensor | None) -> torch.Tensor | None:
        return x if x is None else self.fetched_weight(name, x)

    def send_gradient(
        self, name: str, value: torch.Tensor, before: torch.Tensor | None = None
    ) -> None:
        """Taken as autograd takes it at a leaf: later ones are added to what is there."""
        if name not in self._taken:
            return
        self._taken.remove(name)
        home = self._homes[name]
        held = home.parameter.grad
        if held is not None and not home.is_home(held):
            held.add_(value)
            return
        if held is not None:
            if before is None:
                before = self.fetched_weight(name, self.fetch_weight(name))
            value = before.add_(value)
        self.leaving[name] = self._memory.send(home.offset, value), value
        home.parameter.grad = home.lay_out(value)

    def sent_gradient(self, name: str, _: None, value: object) -> None:  # noqa: ARG002
        if name in self.leaving:
            self._sent(name)

    # --- of a weight that is read slice by slice

    def begin_weight(self, name: str, parts: int) -> torch.Tensor:
        home = self._homes[name]
        rows, columns = home.there.shape
        there = OffloadedMatrix(
            offset=home.offset, rows=rows, columns=columns, dtype=home.there.dtype
        )
        return self.products.begin(name, there, parts)

    def end_weight(self, name: str, _: torch.Tensor) -> None:
        self.products.end(name)

    # --- of a gradient that is made slice by slice

    def begin_gradient(self, name: str, parts: int) -> torch.Tensor:
        return self.gradients.begin(name, self._homes[name], parts)

    def leave_gradient(self, name: str) -> None:
        """Sent as its slices are made."""

    def arrived_gradient(self, name: str, room: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Fetched as it was added to."""
        return room

    def end_gradient(self, name: str, *_: object) -> None:
        self.gradients.end(name)

    # --- calls of an update: a parameter and its gradient are near for it

    def _fetch(self, name: str) -> None:
        home = self._homes[name]
        if name.startswith(WEIGHT) or home.is_home(home.parameter.grad):
            self.fetch_weight(name)

    def _fetched(self, name: str) -> None:
        if name not in self._arriving:
            return
        parameter, (_, x) = self._homes[name].parameter, self._arriving[name]
        self.fetched_weight(name, x)
        if name.startswith(WEIGHT):
            parameter.data = x
        else:
            parameter.grad = x
            self._near.add(name)

    def updated(self, parameter: str) -> None:
        """Its gradient is where it was before; it was only read."""
        name = GRADIENT + parameter
        if name in self._near:
            self._near.remove(name)
            self._homes[name].parameter.grad = self._homes[name].there

    def _send(self, name: str) -> None:
        home, near = self._homes[name], self._homes[name].parameter.data
        self.leaving[name] = self._memory.send(home.offset, near), near
        home.parameter.data = home.lay_out(near)

    def _sent(self, name: str) -> None:
        self._memory.await_sent(self.leaving[name][0])
        del self.leaving[name]
