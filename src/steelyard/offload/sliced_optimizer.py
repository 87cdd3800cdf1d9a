"""The optimizer's own step on a few rows of a parameter at a time. While one slice is updated, the
next one is fetched and the previous one is sent back.

The optimizer sees a smaller parameter, with a gradient and state of its size; scalar state, such as
the step count, advances once for all rows. The program determines which parameters are sliced, and
the number of slices.
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

# Transfers of one slice to offload memory, each with the tensor that is sent.
_Leaving = list[tuple["Future[None]", torch.Tensor]]
_PLAN_AGAIN = "plan again with the optimizer as it is now"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedUpdate:
    """The sliced update of one parameter. ``state_offsets`` are the offsets of its optimizer
    state in offload memory, by key."""

    name: str
    weight: TensorLocation
    gradient: TensorLocation
    state_offsets: Mapping[str, int]
    parts: int
    memory: OffloadFile

    def run(self, optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
        """Update the parameter slice by slice. ``update`` calls the optimizer for this parameter
        alone. Weight, gradient and state must all be offloaded, except a gradient that other code
        assigned.
        """
        parameter, whole = self.weight.parameter, self.weight.offloaded
        gradient = parameter.grad
        resident_gradient = gradient if not self.gradient.is_offloaded(gradient) else None
        self._check(gradient)
        # The state is an empty dict even if all of it is offloaded.
        entry = optimizer.state.get(parameter)
        old_state = entry if entry or isinstance(entry, OffloadedState) else None
        slices = _StateSlices(
            whole=whole,
            parts=self.parts,
            memory=self.memory,
            fetched={
                _WEIGHT: self.weight.offset,
                **({_GRADIENT: self.gradient.offset} if gradient is not resident_gradient else {}),
                **({} if old_state is None else self.state_offsets),
            },
        )
        numbers = ScalarStates(old_state or {})
        state: dict[str, Any] = {}
        is_done = False
        try:
            for number, (start, end) in enumerate(slices.spans):
                rows = slices.arrived(number)
                row_gradient = (
                    resident_gradient[start:end]
                    if resident_gradient is not None
                    else rows.get(_GRADIENT)
                )
                row_state = (
                    None
                    if old_state is None
                    else self._in_order(old_state, rows, numbers.restored())
                )
                state = updated_rows(
                    optimizer,
                    parameter,
                    update,
                    weight=rows[_WEIGHT],
                    gradient=row_gradient,
                    state=row_state,
                )
                slices.send(number, self._tensors_to_send(parameter, state, rows[_WEIGHT].shape))
            slices.await_sent()
            is_done = True
        finally:
            parameter.grad = None
            parameter.data, parameter.grad = whole, gradient
            self._restore(optimizer, old_state, state if is_done else None, numbers)

    def _check(self, gradient: torch.Tensor | None) -> None:
        offloaded_tensors = (
            self.weight.offloaded,
            *([gradient] if self.gradient.is_offloaded(gradient) else ()),
        )
        if not all(x is not None and x.is_contiguous() for x in offloaded_tensors):
            raise Mismatch(
                f"parameter {self.name} or its gradient is no longer contiguous",
                expected="the strides that it had at planning, because it is updated in slices",
                remedy="plan again for this model",
            )

    def _in_order(
        self,
        old_state: dict[str, Any],
        rows: Mapping[str, torch.Tensor],
        numbers: Mapping[str, Any],
    ) -> dict[str, Any]:
        keys = (
            old_state.keys_in_order if isinstance(old_state, OffloadedState) else tuple(old_state)
        )
        return {key: rows[key] if key in self.state_offsets else numbers[key] for key in keys}

    def _tensors_to_send(
        self, parameter: nn.Parameter, state: Mapping[str, Any], shape: torch.Size
    ) -> dict[int, torch.Tensor]:
        """Return the tensors to send after an update, by offset."""
        for key, value in state.items():
            is_number = not isinstance(value, torch.Tensor) or value.numel() == 1
            has_same_form = isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (
                shape, parameter.dtype
            )  # fmt: skip
            if not (has_same_form if key in self.state_offsets else is_number):
                raise Mismatch(
                    f"the optimizer state {key} of {self.name} has changed its shape or dtype",
                    expected="the state at planning, because it is updated in slices",
                    remedy=_PLAN_AGAIN,
                )
        if state and (missing := self.state_offsets.keys() - state.keys()):
            raise Mismatch(
                f"the optimizer has no state {min(missing)} for {self.name}",
                expected="the state that it was planned with",
                remedy=_PLAN_AGAIN,
            )
        tensors = {self.state_offsets[key]: state[key] for key in self.state_offsets if state}
        return {self.weight.offset: parameter.data, **tensors}

    def _restore(
        self,
        optimizer: torch.optim.Optimizer,
        old_state: dict[str, Any] | None,
        state: dict[str, Any] | None,
        numbers: "ScalarStates",
    ) -> None:
        parameter = self.weight.parameter
        if state is None and old_state is None:
            optimizer.state.pop(parameter, None)
        elif state is None:
            assert old_state is not None
            old_state.update(numbers.restored())
            optimizer.state[parameter] = old_state
        elif self.state_offsets.keys() & state.keys():
            layout = OffloadedLayout.of(self.weight.offloaded)
            resident = {key: value for key, value in state.items() if key not in self.state_offsets}
            entry = OffloadedState(
                resident, tuple(state), dict.fromkeys(self.state_offsets, layout)
            )
            optimizer.state[parameter] = entry


_WEIGHT, _GRADIENT = "parameter", "gradient"


def updated_rows(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    update: Callable[[], object],
    *,
    weight: torch.Tensor,
    gradient: torch.Tensor | None,
    state: dict[str, Any] | None,
) -> dict[str, Any]:
    """Let the optimizer update these rows as if they were the whole parameter; return its state
    afterwards."""
    parameter.grad = None  # torch requires that a gradient has the shape of its parameter
    parameter.data, parameter.grad = weight, gradient
    if state is None:
        optimizer.state.pop(parameter, None)
    else:
        optimizer.state[parameter] = state
    update()
    return dict(optimizer.state.get(parameter) or {})


class ScalarStates:
    """The scalar state of a parameter from before the step, restored for each slice."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._scalars = {
            key: (value, value.item() if isinstance(value, torch.Tensor) else copy.deepcopy(value))
            for key, value in state.items()
            if not isinstance(value, torch.Tensor) or value.numel() == 1
        }

    def restored(self) -> dict[str, Any]:
        return {
            key: value.fill_(number) if isinstance(value, torch.Tensor) else copy.deepcopy(number)
            for key, (value, number) in self._scalars.items()
        }


class _StateSlices:
    """Row slices of several offloaded tensors, in buffers of two slices each."""

    def __init__(
        self, *, whole: torch.Tensor, parts: int, memory: OffloadFile, fetched: Mapping[str, int]
    ) -> None:
        self._memory, self._offsets = memory, fetched
        self._row_bytes = whole[0].nbytes
        slice_rows = rows_of_slice(len(whole), self._row_bytes, parts)
        self.spans = [
            (s, min(s + slice_rows, len(whole))) for s in range(0, len(whole), slice_rows)
        ]
        self._buffers = {key: whole.new_empty((2, slice_rows, whole.shape[1])) for key in fetched}
        self._leaving: _Leaving = []
        self._arriving = self._fetch(0)

    def arrived(self, number: int) -> dict[str, torch.Tensor]:
        for transfer in self._arriving:
            self._memory.await_fetched(transfer)
        self.await_sent()
        self._arriving = self._fetch(number + 1)
        return self._rows(number)

    def send(self, number: int, tensors: Mapping[int, torch.Tensor]) -> None:
        start, _ = self.spans[number]
        for offset, x in tensors.items():
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
        return {key: buffer[number % 2, : end - start] for key, buffer in self._buffers.items()}
