"""Weights, gradients and optimizer state in offload memory. They are fetched for the update of
their parameter, and sent back.

The optimizer's own step runs for one parameter after another, in the order of the program; its
hooks run once. The program determines which parameters are transferred, and when.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from steelyard.errors import BadInput, Mismatch, RunFailed
from steelyard.ir.graph import OFFLOAD_CALLS
from steelyard.ir.optimizer_update import (
    GRADIENT,
    WEIGHT,
    key_of,
    offloaded_name,
    owners,
    parameter_of,
)
from steelyard.ir.program import Program
from steelyard.offload.location import OffloadedLayout
from steelyard.offload.optimizer_state_entry import OffloadedState
from steelyard.offload.parameters import OffloadedTensors
from steelyard.offload.sliced_optimizer import ScalarStates, SlicedUpdate, updated_rows
from steelyard.offload.tier import OffloadFile
from steelyard.passes.offload.sliced_optimizer import counts_of

_PROBE_STEPS = 3


class OffloadedStates:
    """Replaces ``optimizer.step``, if there is an optimizer. ``tensors`` are the offloaded weights
    and gradients.

    Between steps the state of an offloaded parameter is an ``OffloadedState``.
    ``optimizer.state_dict()`` fetches all of it, and the next step sends it to offload memory
    again.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        program: Program,
        *,
        parameters: Mapping[str, nn.Parameter],
        memory: OffloadFile,
    ) -> None:
        self._memory = memory
        nbytes_of = program.offloaded_nbytes
        places = dict(
            zip(nbytes_of, memory.reserve_permanent(list(nbytes_of.values())), strict=True)
        )
        self.tensors = OffloadedTensors(
            {n: (parameters[parameter_of(n)], places[n]) for n in places if not _is_state(n)},
            memory=memory,
        )
        self._places = {
            n: _Place(offset=places[n], nbytes=nbytes_of[n]) for n in filter(_is_state, places)
        }
        self._parameters = {name: parameters[parameter_of(name)] for name in self._places}
        self._arriving: dict[str, Any] = {}
        self._leaving: dict[str, Any] = {}
        if optimizer is None or program.update is None or not program.update.is_moving:
            return
        self._optimizer = optimizer
        self._sliced = {
            name: self._sliced_update(name, parts)
            for name, parts in counts_of(program.update).items()
        }
        self._calls_of_update = tuple(_calls_of_update(program.update, self._sliced))
        self._portions = {
            name: parameters[name]
            for call, name in self._calls_of_update
            if call == "update" and name
        }
        self._moved = {id(p) for p in self._portions.values()}
        self._calls = {
            "fetch": self._fetch, "fetched": self._fetched, "send": self._send, "sent": self._sent
        }  # fmt: skip
        self._raw = _raw_step(optimizer)
        hooked = torch.optim.Optimizer.profile_hook_step(self._step)
        # Set on the instance, because schedulers and gradient scalers call it there.
        optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]
        optimizer.register_state_dict_pre_hook(lambda _: self.fetch_all())

    def _step(self, optimizer: torch.optim.Optimizer, closure: object = None) -> None:
        if closure is not None:
            raise BadInput(
                "the optimizer was called with a closure, but its state is in offload memory",
                expected="optimizer.step() without a closure",
                remedy="compute the loss before, or plan without offload memory",
            )
        self.tensors.begin()
        self._arriving.clear()
        self._leaving.clear()
        groups = _Groups(optimizer)
        with groups.restored(), self._finishing_sends():
            for call, name in self._calls_of_update:
                if call == "update":
                    self._update(name, groups)
                    self.tensors.updated(name)
                elif _is_state(name):
                    self._calls[call](name)
                else:
                    self.tensors.calls[call](name)

    @contextlib.contextmanager
    def _finishing_sends(self) -> Iterator[None]:
        """Wait for all pending sends if an update is interrupted, for example by Ctrl-C. Otherwise
        a reader could overtake a write that is still in flight, and see stale bytes.
        """
        try:
            yield
        except RunFailed:
            raise  # offload memory itself failed, so pending sends never complete
        except BaseException:
            for transfer, _ in (*self._leaving.values(), *self.tensors.leaving.values()):
                self._memory.await_sent(transfer)
            raise

    def _update(self, name: str, groups: "_Groups") -> None:
        def update() -> None:
            groups.choose(partial(self._is_in_portion, name))
            self._raw(self._optimizer)

        if name in self._sliced:
            self._send_all(n for n in self._parameters if parameter_of(n) == name)
            self._sliced[name].run(self._optimizer, update)
        else:
            update()

    def _sliced_update(self, name: str, parts: int) -> SlicedUpdate:
        state_names = [
            state_name for state_name in self._places if parameter_of(state_name) == name
        ]
        return SlicedUpdate(
            name=name,
            weight=self.tensors.location(WEIGHT + name),
            gradient=self.tensors.location(GRADIENT + name),
            state_offsets={
                key_of(state_name): self._places[state_name].offset for state_name in state_names
            },
            parts=parts,
            memory=self._memory,
        )

    def _is_in_portion(self, name: str, parameter: torch.Tensor) -> bool:
        """Return True if the parameter belongs to the portion with this name. The portion without a
        name consists of all parameters that are not offloaded.
        """
        return parameter is self._portions[name] if name else id(parameter) not in self._moved

    # --- the four transfer calls, each for one tensor

    def _fetch(self, name: str) -> None:
        state = self._optimizer.state.get(self._parameters[name])
        if isinstance(state, OffloadedState):
            x = state.layouts[key_of(name)].empty()
            self._arriving[name] = self._memory.fetch(self._places[name].offset, x), x

    def _fetched(self, name: str) -> None:
        if name in self._arriving:
            transfer, x = self._arriving.pop(name)
            self._memory.await_fetched(transfer)
            self._insert(name, x)

    def _insert(self, name: str, x: torch.Tensor) -> None:
        """Put ``x`` into the resident state; the keys stay in the order that the optimizer made."""
        state = self._optimizer.state[self._parameters[name]]
        resident = {**state, key_of(name): x}
        if len(resident) == len(state.keys_in_order):
            self._optimizer.state[self._parameters[name]] = {
                k: resident[k] for k in state.keys_in_order
            }
        else:
            self._optimizer.state[self._parameters[name]] = state.with_resident(resident)

    def _send(self, name: str) -> None:
        parameter, key = self._parameters[name], key_of(name)
        state = self._optimizer.state.get(parameter)
        if not state:
            return  # There is no state yet, because there was no gradient so far.
        place = self._places[name]
        x = dict.get(state, key)
        if not isinstance(x, torch.Tensor) or x.nbytes != place.nbytes:
            raise Mismatch(
                f"the optimizer has no state {key} of {place.nbytes} bytes for "
                f"{parameter_of(name)}",
                expected="the state that it was planned with",
                remedy="plan again with the optimizer as it is now",
            )
        offloaded = (
            state if isinstance(state, OffloadedState) else OffloadedState(state, tuple(state), {})
        )
        self._optimizer.state[parameter] = offloaded.without(key, OffloadedLayout.of(x))
        self._leaving[name] = self._memory.send(place.offset, x), x

    def _sent(self, name: str) -> None:
        if name in self._leaving:
            self._memory.await_sent(self._leaving[name][0])
            del self._leaving[name]

    # --- all tensors at once

    def fetch_all(self, empty: "Callable[[OffloadedLayout], torch.Tensor] | None" = None) -> None:
        for name, parameter in self._parameters.items():
            state = self._optimizer.state.get(parameter)
            if isinstance(state, OffloadedState):
                layout = state.layouts[key_of(name)]
                x = empty(layout) if empty else layout.empty()
                self._memory.await_fetched(self._memory.fetch(self._places[name].offset, x))
                self._insert(name, x)

    def offload_all(self) -> None:
        self._send_all(self._parameters)

    def _send_all(self, names: Iterable[str]) -> None:
        for name in names:
            if key_of(name) in self._optimizer.state.get(self._parameters[name], ()):
                self._send(name)
                self._sent(name)

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Make all optimizer state readable, as memory-mapped files whose pages the system may
        evict.
        """
        state = self._optimizer.state
        offloaded_states = {p: s for p, s in state.items() if isinstance(s, OffloadedState)}
        self.fetch_all(self._mapped)
        try:
            yield
        finally:
            state.update(offloaded_states)

    def allocator_for(self, name: str) -> Callable[..., torch.Tensor]:
        """Return a function that allocates a state tensor for this parameter. The tensor is then
        filled, and sent by ``offload_all``.
        """
        if not any(parameter_of(moved) == name for moved in self._parameters):
            return torch.empty_strided
        return lambda shape, stride, *, dtype, device: self._mapped(  # noqa: ARG005 - on the CPU
            OffloadedLayout(shape=torch.Size(shape), stride=tuple(stride), dtype=dtype)
        )

    def _mapped(self, layout: "OffloadedLayout") -> torch.Tensor:
        """Return a tensor on an unnamed file in the folder of offload memory. The file disappears
        with the tensor.
        """
        if layout.nbytes < mmap.PAGESIZE:
            return layout.empty()
        file = os.open(self._memory.offload_memory.folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            os.ftruncate(file, layout.nbytes)
            pages = mmap.mmap(file, layout.nbytes)
        finally:
            os.close(file)
        return layout.on(torch.frombuffer(pages, dtype=torch.uint8))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    offset: int
    nbytes: int


def _is_state(name: str) -> bool:
    return not name.startswith((WEIGHT, GRADIENT))


def _calls_of_update(update: Program, sliced: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the calls of an optimizer update: the transfers of the program, each with the name of
    the tensor, and one ``update`` for each portion.

    A portion is named after its parameter; the one without a name consists of all parameters of
    which nothing is offloaded. The tensors of a ``sliced`` parameter are transferred within its
    update.
    """
    nodes = update.graph.by_name
    owner = owners(update.graph)
    assert owner is not None
    offloaded = {parameter_of(offloaded_name(node)) for node in nodes.values() if node.is_transfer}
    done: set[str] = set()
    for line in update.instructions:
        node = nodes[line.node]
        if node.is_transfer and owner[line.node] in sliced:
            continue
        if node.is_transfer:
            yield node.op.removeprefix(OFFLOAD_CALLS).partition("_")[0], offloaded_name(node)
            continue
        portion = owner[line.node] if owner[line.node] in offloaded else ""
        if portion not in done:
            yield "update", portion
        done.add(portion)


class _Groups:
    """An optimizer's parameter groups, which can be restricted to some parameters and restored."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = [
            (group, group["params"], {k: v for k, v in group.items() if k != "params"})
            for group in optimizer.param_groups
        ]

    def choose(self, is_chosen: Callable[[torch.Tensor], bool]) -> None:
        """Restrict the groups to the chosen parameters, with the settings from before the step. An
        optimizer that counts its steps in a group thus counts each step only once.
        """
        for group, parameters, settings in self._groups:
            chosen = [p for p in parameters if is_chosen(p)]
            group.clear()
            group.update(settings, params=chosen)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        try:
            yield
        finally:
            for group, parameters, _ in self._groups:
                group["params"] = parameters


def _raw_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], object]:
    """Return the optimizer's step without torch's hooks around it."""
    step = type(optimizer).step
    return step.__wrapped__ if hasattr(step, "hooked") else step  # type: ignore[attr-defined]


def why_undivided(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], dims: Sequence[int]
) -> str:
    """Return why the optimizer cannot be called for one parameter at a time; empty if it can.

    This is tried on parameters of one element each, because some optimizers read all gradients or
    count their own calls.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            whole = _probe(make, dims, one_by_one=False)
            divided = _probe(make, dims, one_by_one=True)
        except Exception as error:  # noqa: BLE001 - an optimizer may fail in its own way
            return f"the optimizer fails on one parameter at a time ({type(error).__name__})"
    same = len(whole) == len(divided) and all(map(_is_same, whole, divided))
    return "" if same else "the optimizer's step gives other results for one parameter at a time"


def _probe(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    dims: Sequence[int],
    *,
    one_by_one: bool,
) -> list[object]:
    """Return the parameters, settings and state after a few steps."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,) * count for count in dims]
    parameters = [
        nn.Parameter(torch.randn(shape, generator=generator, device="cpu")) for shape in shapes
    ]
    optimizer = make(parameters)
    raw = _raw_step(optimizer)
    for _ in range(_PROBE_STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, device="cpu")
        groups = _Groups(optimizer)
        # In reverse order, because the result must not depend on the order either.
        portions: list[Collection[int]] = [{id(p)} for p in reversed(parameters)]
        with groups.restored():
            for chosen in portions if one_by_one else [set(map(id, parameters))]:
                groups.choose(partial(_is_chosen, chosen))
                raw(optimizer)
    found: list[object] = [p.detach() for p in parameters]
    for group in optimizer.param_groups:
        found += [v for k, v in group.items() if k != "params"]
    for parameter in parameters:
        found += optimizer.state[parameter].values()
    return found


def why_unsliceable(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> str:
    """Return why the optimizer cannot be called for some rows of a parameter; empty if it can.

    This is tried on a small parameter, because the state may depend on the size of the parameter or
    on other rows.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            whole, divided = _probe_in_rows(make, [4]), _probe_in_rows(make, [3, 1])
        except Exception as error:  # noqa: BLE001 - an optimizer may fail in its own way
            return f"the optimizer fails on some rows of a parameter ({type(error).__name__})"
    same = len(whole) == len(divided) and all(map(_is_same, whole, divided))
    return "" if same else "the optimizer's step gives other results for some rows of a parameter"


# This is so wide that slices begin and end on vector boundaries of any processor.
_PROBE_COLUMNS = 64


def _probe_in_rows(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], counts: Sequence[int]
) -> list[object]:
    """Return a parameter and its state after a few steps, each taken on ``counts`` rows at a
    time."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(sum(counts), _PROBE_COLUMNS, generator=generator, device="cpu")
    parameter = nn.Parameter(whole)
    optimizer = make([parameter])
    raw = _raw_step(optimizer)
    weights = list(whole.split(list(counts)))
    states: list[dict[str, Any] | None] = [None for _ in counts]
    for _ in range(_PROBE_STEPS):
        gradients = torch.randn(whole.shape, generator=generator, device="cpu").split(list(counts))
        groups, numbers = _Groups(optimizer), ScalarStates(states[0] or {})

        def update(groups: _Groups = groups) -> None:
            groups.choose(lambda _: True)
            raw(optimizer)

        with groups.restored():
            for index, gradient in enumerate(gradients):
                before = states[index]
                state = None if before is None else {**before, **numbers.restored()}
                states[index] = updated_rows(
                    optimizer, parameter, update,
                    weight=weights[index], gradient=gradient, state=state,
                )  # fmt: skip
                weights[index] = parameter.data
    found: list[object] = [torch.cat(weights)]
    for group in optimizer.param_groups:
        found += [v for k, v in group.items() if k != "params"]
    for key, value in (states[-1] or {}).items():
        rows = [state[key] for state in states if state]
        is_large = isinstance(value, torch.Tensor) and value.numel() > 1
        found.append(torch.cat(rows) if is_large else value)
    return found


def _is_chosen(chosen: Collection[int], parameter: torch.Tensor) -> bool:
    return id(parameter) in chosen


def _is_same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
