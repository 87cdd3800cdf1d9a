"""The optimizer's own step on some rows of a parameter at a time: the next ones are on their way
while it changes these, and the last ones go back.

It finds a smaller parameter, with a gradient and state of its size; what it keeps in numbers moves
on once for all rows. Not for which parameters, nor how many slices: that is the program's.
"""

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from steelyard.errors import Mismatch
from steelyard.offload.location import OffloadedLayout, TensorLocation
from steelyard.offload.optimizer_state_entry import OffloadedState
from steelyard.offload.tier import OffloadFile
from steelyard.passes.offload.transfer_nodes import rows_of_slice

# What is sent, and the transfers of one slice.
_Leaving = list[tuple["Future[None]", torch.Tensor]]
_PLAN_AGAIN = "plan again with the optimizer as it is now"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedUpdate:
    """Of one parameter; ``kept`` are the offsets of what the optimizer keeps for it, by key."""

    name: str
    weight: TensorLocation
    gradient: TensorLocation
    kept: Mapping[str, int]
    parts: int
    memory: OffloadFile

    def run(self, optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
        """``update`` calls the optimizer for this parameter alone. All that is moved of it is far,
        but a gradient that somebody else put there."""
        parameter, whole = self.weight.parameter, self.weight.there
        gradient = parameter.grad
        near = gradient if not self.gradient.is_home(gradient) else None
        self._check(gradient)
        # What lies far alone leaves an empty dict.
        found = optimizer.state.get(parameter)
        held = found if found or isinstance(found, OffloadedState) else None
        slices = _StateSlices(
            whole=whole,
            parts=self.parts,
            memory=self.memory,
            fetched={
                _WEIGHT: self.weight.offset,
                **({_GRADIENT: self.gradient.offset} if gradient is not near else {}),
                **({} if held is None else self.kept),
            },
        )
        numbers = ScalarStates(held or {})
        state: dict[str, Any] = {}
        is_over = False
        try:
            for number, (start, end) in enumerate(slices.spans):
                rows = slices.arrived(number)
                own = near[start:end] if near is not None else rows.get(_GRADIENT)
                kept = None if held is None else self._in_order(held, rows, numbers.again())
                state = updated_rows(
                    optimizer, parameter, update, weight=rows[_WEIGHT], gradient=own, kept=kept
                )
                slices.send(number, self._going(parameter, state, rows[_WEIGHT].shape))
            slices.await_sent()
            is_over = True
        finally:
            parameter.grad = None
            parameter.data, parameter.grad = whole, gradient
            self._put_back(optimizer, held, state if is_over else None, numbers)

    def _check(self, gradient: torch.Tensor | None) -> None:
        far = (self.weight.there, *([gradient] if self.gradient.is_home(gradient) else ()))
        if not all(x is not None and x.is_contiguous() for x in far):
            raise Mismatch(
                f"parameter {self.name} or its gradient no longer lies row by row",
                expected="the strides that it was planned with: it is updated in slices",
                remedy="plan again for this model",
            )

    def _in_order(
        self, held: dict[str, Any], rows: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]
    ) -> dict[str, Any]:
        keys = held.keys_in_order if isinstance(held, OffloadedState) else tuple(held)
        return {key: rows[key] if key in self.kept else numbers[key] for key in keys}

    def _going(
        self, parameter: nn.Parameter, state: Mapping[str, Any], shape: torch.Size
    ) -> dict[int, torch.Tensor]:
        """What goes to which offset, as the optimizer left it."""
        for key, value in state.items():
            is_number = not isinstance(value, torch.Tensor) or value.numel() == 1
            is_alike = isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (
                shape, parameter.dtype
            )  # fmt: skip
            if not (is_alike if key in self.kept else is_number):
                raise Mismatch(
                    f"the optimizer keeps {key} for {self.name} in another form than it did",
                    expected="the state that it was planned with: it is updated in slices",
                    remedy=_PLAN_AGAIN,
                )
        if state and (missed := self.kept.keys() - state.keys()):
            raise Mismatch(
                f"the optimizer keeps no {min(missed)} for {self.name}",
                expected="the state that it was planned with",
                remedy=_PLAN_AGAIN,
            )
        kept = {self.kept[key]: state[key] for key in self.kept if state}
        return {self.weight.offset: parameter.data, **kept}

    def _put_back(
        self,
        optimizer: torch.optim.Optimizer,
        held: dict[str, Any] | None,
        state: dict[str, Any] | None,
        numbers: "ScalarStates",
    ) -> None:
        parameter = self.weight.parameter
        if state is None and held is None:
            optimizer.state.pop(parameter, None)
        elif state is None:
            assert held is not None
            held.update(numbers.again())
            optimizer.state[parameter] = held
        elif self.kept.keys() & state.keys():
            layout = OffloadedLayout.of(self.weight.there)
            near = {key: value for key, value in state.items() if key not in self.kept}
            away = OffloadedState(near, tuple(state), dict.fromkeys(self.kept, layout))
            optimizer.state[parameter] = away


_WEIGHT, _GRADIENT = "parameter", "gradient"


def updated_rows(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    update: Callable[[], object],
    *,
    weight: torch.Tensor,
    gradient: torch.Tensor | None,
    kept: dict[str, Any] | None,
) -> dict[str, Any]:
    """What the optimizer keeps once it has changed these rows, as if they were all there is."""
    parameter.grad = None  # a gradient has the shape of its parameter at all times
    parameter.data, parameter.grad = weight, gradient
    if kept is None:
        optimizer.state.pop(parameter, None)
    else:
        optimizer.state[parameter] = kept
    update()
    return dict(optimizer.state.get(parameter) or {})


class ScalarStates:
    """What an optimizer keeps for a parameter in numbers, as before the step: for each slice."""

    def __init__(self, kept: Mapping[str, Any]) -> None:
        self._kept = {
            key: (value, value.item() if isinstance(value, torch.Tensor) else copy.deepcopy(value))
            for key, value in kept.items()
            if not isinstance(value, torch.Tensor) or value.numel() == 1
        }

    def again(self) -> dict[str, Any]:
        return {
            key: value.fill_(number) if isinstance(value, torch.Tensor) else copy.deepcopy(number)
            for key, (value, number) in self._kept.items()
        }


class _StateSlices:
    """Some rows of each of these at a time, in room for two slices of each."""

    def __init__(
        self, *, whole: torch.Tensor, parts: int, memory: OffloadFile, fetched: Mapping[str, int]
    ) -> None:
        self._memory, self._offsets = memory, fetched
        self._row_bytes = whole[0].nbytes
        each = rows_of_slice(len(whole), self._row_bytes, parts)
        self.spans = [(s, min(s + each, len(whole))) for s in range(0, len(whole), each)]
        self._rooms = {key: whole.new_empty((2, each, whole.shape[1])) for key in fetched}
        self._leaving: _Leaving = []
        self._arriving = self._fetch(0)

    def arrived(self, number: int) -> dict[str, torch.Tensor]:
        for transfer in self._arriving:
            self._memory.await_fetched(transfer)
        self.await_sent()
        self._arriving = self._fetch(number + 1)
        return self._rows(number)

    def send(self, number: int, going: Mapping[int, torch.Tensor]) -> None:
        start, _ = self.spans[number]
        for offset, x in going.items():
            x = x.contiguous()
            sending = self._memory.send(offset + start * self._row_bytes, x)
            self._leaving.append((sending, x))

    def await_sent(self) -> None:
        for transfer, _ in self._leaving:
            self._memory.await_sent(transfer)
        self._leaving.clear()

    def _fetch(self, number: int) -> "list[Future[None]]":
        if number == len(self.spans):
            return []
        start, _ = self.spans[number]
        return [
            self._memory.fetch(self._offsets[key] + start * self._row_bytes, x)
            for key, x in self._rows(number).items()
        ]

    def _rows(self, number: int) -> dict[str, torch.Tensor]:
        start, end = self.spans[number]
        return {key: room[number % 2, : end - start] for key, room in self._rooms.items()}
