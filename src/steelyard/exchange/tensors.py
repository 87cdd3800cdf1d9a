"""Weights and gradients in far memory: live tensors all the while, that lie on its file.

Whoever reads or writes one between steps finds it, through the page cache, which the system may
empty at any time. A step fetches copies and sends them back past that cache. Not for which, nor
when: that is the program's.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import nn

from steelyard.core.trips import rows_of_slice
from steelyard.core.updates import GRADIENT, WEIGHT
from steelyard.exchange.far import FarMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a tensor lies that is not here."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor) -> "Layout":
        return cls(shape=x.shape, stride=x.stride(), dtype=x.dtype)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def on(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(slots=True, kw_only=True, eq=False)
class _Home:
    """Where in far memory one of them lies; ``there`` is the live tensor that is that place."""

    parameter: nn.Parameter
    offset: int
    pages: torch.Tensor
    there: torch.Tensor

    def is_home(self, x: torch.Tensor | None) -> bool:
        return x is not None and x.data_ptr() == self.there.data_ptr()

    def lay_out(self, like: torch.Tensor) -> torch.Tensor:
        self.there = Layout.of(like).on(self.pages)
        return self.there


@dataclass(slots=True, kw_only=True, eq=False)
class _Slices:
    """The rows of a weight, some at a time: the next are on their way while these are used."""

    weight: torch.Tensor
    memory: FarMemory
    offset: int
    room: torch.Tensor
    arriving: "deque[tuple[Future[None], int, torch.Tensor]]"

    @classmethod
    def of(cls, home: _Home, memory: FarMemory, parts: int) -> "_Slices":
        weight = home.there
        rows = rows_of_slice(weight.shape[0], weight[0].nbytes, parts)
        room = weight.new_empty((2, rows, weight.shape[1]))
        slices = cls(weight=weight, memory=memory, offset=home.offset, room=room, arriving=deque())
        for number in range(2):
            slices._fetch(number)
        return slices

    def _fetch(self, number: int) -> None:
        each = self.room.shape[1]
        start, end = number * each, min((number + 1) * each, self.weight.shape[0])
        if start < end:
            rows = self.room[number % 2, : end - start]
            offset = self.offset + start * self.weight[0].nbytes
            self.arriving.append((self.memory.fetch(offset, rows), start, rows))

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        number = 2
        while self.arriving:
            transfer, start, rows = self.arriving.popleft()
            self.memory.await_fetched(transfer)
            yield start, rows
            self._fetch(number)
            number += 1


class FarTensors:
    """``places`` has each, by its name in the program, with its parameter and its offset."""

    def __init__(
        self, places: Mapping[str, tuple[nn.Parameter, int]], *, memory: FarMemory
    ) -> None:
        self._memory = memory
        self._homes: dict[str, _Home] = {}
        for name, (parameter, offset) in places.items():
            pages = memory.mapped(offset, parameter.nbytes)
            there = Layout.of(parameter).on(pages)
            self._homes[name] = _Home(parameter=parameter, offset=offset, pages=pages, there=there)
        self._weights = [home for name, home in self._homes.items() if name.startswith(WEIGHT)]
        self._arriving: dict[str, tuple[Future[None], torch.Tensor]] = {}
        # With what is sent: the last to let go of it must not be the thread that sends it, where
        # nobody sees memory come free.
        self._leaving: dict[str, tuple[Future[None], torch.Tensor]] = {}
        self._slicing: dict[str, deque[_Slices]] = {}
        self._taken: set[str] = set()
        self._near: set[str] = set()
        self.calls: Mapping[str, Callable[[str], None]] = {
            "fetch": self._fetch, "fetched": self._fetched, "send": self._send, "sent": self._sent
        }  # fmt: skip
        self.put_away()

    def begin(self) -> None:
        """Before a step or an update: nothing is left under way by one that failed."""
        for unfinished in (self._arriving, self._leaving, self._slicing, self._taken, self._near):
            unfinished.clear()
        self.put_away()

    def put_away(self) -> None:
        """Weights that were given other memory meanwhile, as at first all were."""
        for home in self._weights:
            if not home.is_home(home.parameter):
                near = home.parameter.data
                self._memory.await_sent(self._memory.send(home.offset, near))
                home.parameter.data = home.lay_out(near)

    def holds(self, x: torch.Tensor) -> bool:
        """Whether it lies in far memory."""
        return any(home.is_home(x) for home in self._homes.values())

    # --- calls of a pass

    def fetch_weight(self, name: str) -> torch.Tensor:
        home = self._homes[name]
        x = Layout.of(home.there).empty()
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
        self._leaving[name] = self._memory.send(home.offset, value), value
        home.parameter.grad = home.lay_out(value)

    def sent_gradient(self, name: str, _: None, value: object) -> None:  # noqa: ARG002
        if name in self._leaving:
            self._sent(name)

    # --- products with a weight that is read slice by slice

    def begin_weight(self, name: str, parts: int) -> torch.Tensor:
        """Begin to fetch the first two."""
        slices = _Slices.of(self._homes[name], self._memory, parts)
        self._slicing.setdefault(name, deque()).append(slices)
        return slices.room

    def columns(
        self, name: str, first: torch.Tensor, second: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x @ weight.T``, or ``bias + x @ weight.T``: each slice gives columns."""
        bias, x = (None, first) if second is None else (first, second)
        slices = self._slicing[name][0]
        out = x.new_empty((x.shape[0], slices.weight.shape[0]))
        for start, rows in slices:
            some = out[:, start : start + len(rows)]
            if bias is None:
                torch.mm(x, rows.t(), out=some)
            else:
                own = bias if bias.shape[-1] == 1 else bias[..., start : start + len(rows)]
                torch.addmm(own, x, rows.t(), out=some)
        return out

    def sum(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight``: each slice gives a term of the sum."""
        slices = self._slicing[name][0]
        out = x.new_zeros((x.shape[0], slices.weight.shape[1]))
        for start, rows in slices:
            out.addmm_(x[:, start : start + len(rows)], rows)
        return out

    def end_weight(self, name: str, _: torch.Tensor) -> None:
        self._slicing[name].popleft()

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
        self._leaving[name] = self._memory.send(home.offset, near), near
        home.parameter.data = home.lay_out(near)

    def _sent(self, name: str) -> None:
        transfer, _ = self._leaving.pop(name)
        self._memory.await_sent(transfer)
