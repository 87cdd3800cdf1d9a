"""Weights, gradients and what an optimizer keeps, in offload memory: fetched for the update of
their parameter, and sent back.

The optimizer's own step is called for one parameter after another, in the order of the program; its
hooks run once. Not for which parameters, nor when: that is the program's.
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
from steelyard.ir.graph import FAR_CALLS
from steelyard.ir.optimizer_update import GRADIENT, WEIGHT, far_name, key_of, owners, parameter_of
from steelyard.ir.program import Program
from steelyard.offload.location import OffloadedLayout
from steelyard.offload.optimizer_state_entry import OffloadedState
from steelyard.offload.parameters import OffloadedTensors
from steelyard.offload.sliced_optimizer import ScalarStates, SlicedUpdate, updated_rows
from steelyard.offload.tier import OffloadFile
from steelyard.passes.offload.sliced_optimizer import counts_of

_PROBE_STEPS = 3


class OffloadedStates:
    """Takes the place of ``optimizer.step``, if there is an optimizer; ``tensors`` are the weights
    and gradients.

    Between steps the state of a moved parameter is ``OffloadedState``. ``optimizer.state_dict()``
    brings all of it home, and the next step sends it off again.
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
        rooms = program.far_rooms
        places = dict(zip(rooms, memory.kept(list(rooms.values())), strict=True))
        self.tensors = OffloadedTensors(
            {n: (parameters[parameter_of(n)], places[n]) for n in places if not _is_state(n)},
            memory=memory,
        )
        self._places = {
            n: _Place(offset=places[n], nbytes=rooms[n]) for n in filter(_is_state, places)
        }
        self._of = {name: parameters[parameter_of(name)] for name in self._places}
        self._arriving: dict[str, Any] = {}
        self._leaving: dict[str, Any] = {}
        if optimizer is None or program.update is None or not program.update.is_moving:
            return
        self._optimizer = optimizer
        self._sliced = {
            name: self._sliced_update(name, parts)
            for name, parts in counts_of(program.update).items()
        }
        self._deeds = tuple(_deeds(program.update, self._sliced))
        self._portions = {
            name: parameters[name] for what, name in self._deeds if what == "update" and name
        }
        self._moved = {id(p) for p in self._portions.values()}
        self._calls = {
            "fetch": self._fetch, "fetched": self._fetched, "send": self._send, "sent": self._sent
        }  # fmt: skip
        self._raw = _raw_step(optimizer)
        hooked = torch.optim.Optimizer.profile_hook_step(self._step)
        # On the optimizer itself: schedulers and scalers find it there.
        optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]
        optimizer.register_state_dict_pre_hook(lambda _: self.bring_home())

    def _step(self, optimizer: torch.optim.Optimizer, closure: object = None) -> None:
        if closure is not None:
            raise BadInput(
                "the optimizer was called with a closure, and what it keeps lies in offload memory",
                expected="optimizer.step() without one",
                remedy="compute the loss before, or plan without offload memory",
            )
        self.tensors.begin()
        self._arriving.clear()
        self._leaving.clear()
        groups = _Groups(optimizer)
        with groups.put_back(), self._settled():
            for what, name in self._deeds:
                if what == "update":
                    self._update(name, groups)
                    self.tensors.updated(name)
                elif _is_state(name):
                    self._calls[what](name)
                else:
                    self.tensors.calls[what](name)

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        """An update that is broken off, as by Ctrl-C, leaves no place with what was there before:
        whoever reads it next might come before what is still on its way."""
        try:
            yield
        except RunFailed:
            raise  # offload memory itself: nothing more arrives
        except BaseException:
            for transfer, _ in (*self._leaving.values(), *self.tensors.leaving.values()):
                self._memory.await_sent(transfer)
            raise

    def _update(self, name: str, groups: "_Groups") -> None:
        def update() -> None:
            groups.choose(partial(self._is_of, name))
            self._raw(self._optimizer)

        if name in self._sliced:
            self._put_away(n for n in self._of if parameter_of(n) == name)
            self._sliced[name].run(self._optimizer, update)
        else:
            update()

    def _sliced_update(self, name: str, parts: int) -> SlicedUpdate:
        kept = [moved for moved in self._places if parameter_of(moved) == name]
        return SlicedUpdate(
            name=name,
            weight=self.tensors.home(WEIGHT + name),
            gradient=self.tensors.home(GRADIENT + name),
            kept={key_of(moved): self._places[moved].offset for moved in kept},
            parts=parts,
            memory=self._memory,
        )

    def _is_of(self, name: str, parameter: torch.Tensor) -> bool:
        """Of the portion with this name; the last takes all that is not moved."""
        return parameter is self._portions[name] if name else id(parameter) not in self._moved

    # --- the four calls, for one tensor each

    def _fetch(self, name: str) -> None:
        state = self._optimizer.state.get(self._of[name])
        if isinstance(state, OffloadedState):
            x = state.layouts[key_of(name)].empty()
            self._arriving[name] = self._memory.fetch(self._places[name].offset, x), x

    def _fetched(self, name: str) -> None:
        if name in self._arriving:
            transfer, x = self._arriving.pop(name)
            self._memory.await_fetched(transfer)
            self._put(name, x)

    def _put(self, name: str, x: torch.Tensor) -> None:
        """Among what is kept near, in the order in which the optimizer made it."""
        away = self._optimizer.state[self._of[name]]
        near = {**away, key_of(name): x}
        if len(near) == len(away.keys_in_order):
            self._optimizer.state[self._of[name]] = {k: near[k] for k in away.keys_in_order}
        else:
            self._optimizer.state[self._of[name]] = away.with_near(near)

    def _send(self, name: str) -> None:
        parameter, key = self._of[name], key_of(name)
        state = self._optimizer.state.get(parameter)
        if not state:
            return  # it had no gradient yet
        place = self._places[name]
        x = dict.get(state, key)
        if not isinstance(x, torch.Tensor) or x.nbytes != place.nbytes:
            raise Mismatch(
                f"the optimizer keeps no {key} of {place.nbytes} bytes for {parameter_of(name)}",
                expected="the state that it was planned with",
                remedy="plan again with the optimizer as it is now",
            )
        away = (
            state if isinstance(state, OffloadedState) else OffloadedState(state, tuple(state), {})
        )
        self._optimizer.state[parameter] = away.without(key, OffloadedLayout.of(x))
        self._leaving[name] = self._memory.send(place.offset, x), x

    def _sent(self, name: str) -> None:
        if name in self._leaving:
            self._memory.await_sent(self._leaving[name][0])
            del self._leaving[name]

    # --- all of it at once

    def bring_home(self, empty: "Callable[[OffloadedLayout], torch.Tensor] | None" = None) -> None:
        for name, parameter in self._of.items():
            state = self._optimizer.state.get(parameter)
            if isinstance(state, OffloadedState):
                layout = state.layouts[key_of(name)]
                x = empty(layout) if empty else layout.empty()
                self._memory.await_fetched(self._memory.fetch(self._places[name].offset, x))
                self._put(name, x)

    def put_away(self) -> None:
        self._put_away(self._of)

    def _put_away(self, names: Iterable[str]) -> None:
        for name in names:
            if key_of(name) in self._optimizer.state.get(self._of[name], ()):
                self._send(name)
                self._sent(name)

    @contextlib.contextmanager
    def visiting(self) -> Iterator[None]:
        """All of it can be read, from files that the system may take out of memory again."""
        state = self._optimizer.state
        away = {p: s for p, s in state.items() if isinstance(s, OffloadedState)}
        self.bring_home(self._mapped)
        try:
            yield
        finally:
            state.update(away)

    def empty_for(self, name: str) -> Callable[..., torch.Tensor]:
        """What makes a tensor to be kept for this parameter until it is put away."""
        if not any(parameter_of(moved) == name for moved in self._of):
            return torch.empty_strided
        return lambda shape, stride, *, dtype, device: self._mapped(  # noqa: ARG005 - it is near
            OffloadedLayout(shape=torch.Size(shape), stride=tuple(stride), dtype=dtype)
        )

    def _mapped(self, layout: "OffloadedLayout") -> torch.Tensor:
        """Memory that is a file's, in the folder of offload memory and gone with the tensor."""
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


def _deeds(update: Program, sliced: Collection[str]) -> Iterator[tuple[str, str]]:
    """The program's far calls, each with the name of what it moves, and one ``update`` for each
    portion, with the name of its parameter; for those of which nothing is moved, with none. What is
    ``sliced`` comes and goes within its update.
    """
    nodes = update.graph.by_name
    owner = owners(update.graph)
    assert owner is not None
    moved = {parameter_of(far_name(node)) for node in nodes.values() if node.is_far}
    done: set[str] = set()
    for line in update.instructions:
        node = nodes[line.node]
        if node.is_far and owner[line.node] in sliced:
            continue
        if node.is_far:
            yield node.op.removeprefix(FAR_CALLS).partition("_")[0], far_name(node)
            continue
        portion = owner[line.node] if owner[line.node] in moved else ""
        if portion not in done:
            yield "update", portion
        done.add(portion)


class _Groups:
    """An optimizer's groups of parameters, as they were, and with only some of these."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = [
            (group, group["params"], {k: v for k, v in group.items() if k != "params"})
            for group in optimizer.param_groups
        ]

    def choose(self, is_chosen: Callable[[torch.Tensor], bool]) -> None:
        """Settings as before the step: one that counts its steps there counts each once."""
        for group, parameters, settings in self._groups:
            chosen = [p for p in parameters if is_chosen(p)]
            group.clear()
            group.update(settings, params=chosen)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        try:
            yield
        finally:
            for group, parameters, _ in self._groups:
                group["params"] = parameters


def _raw_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], object]:
    """Its step without the hooks around it."""
    step = type(optimizer).step
    return step.__wrapped__ if hasattr(step, "hooked") else step  # type: ignore[attr-defined]


def why_undivided(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], dims: Sequence[int]
) -> str:
    """Why the optimizer cannot be called for one parameter at a time; empty where it can.

    Tried, on parameters of one element each: some read all gradients, or count their own steps.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            whole = _tried(make, dims, one_by_one=False)
            parted = _tried(make, dims, one_by_one=True)
        except Exception as error:  # noqa: BLE001 - an optimizer may fail in its own way
            return f"the optimizer fails on one parameter at a time ({type(error).__name__})"
    same = len(whole) == len(parted) and all(map(_is_same, whole, parted))
    return "" if same else "the optimizer's step is another for one parameter at a time"


def _tried(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    dims: Sequence[int],
    *,
    one_by_one: bool,
) -> list[object]:
    """Parameters, settings and state after a few steps."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,) * count for count in dims]
    held = [nn.Parameter(torch.randn(shape, generator=generator, device="cpu")) for shape in shapes]
    optimizer = make(held)
    raw = _raw_step(optimizer)
    for _ in range(_PROBE_STEPS):
        for parameter in held:
            parameter.grad = torch.randn(parameter.shape, generator=generator, device="cpu")
        groups = _Groups(optimizer)
        # From the last to the first: the order must not matter either.
        portions: list[Collection[int]] = [{id(p)} for p in reversed(held)]
        with groups.put_back():
            for chosen in portions if one_by_one else [set(map(id, held))]:
                groups.choose(partial(_is_among, chosen))
                raw(optimizer)
    found: list[object] = [p.detach() for p in held]
    for group in optimizer.param_groups:
        found += [v for k, v in group.items() if k != "params"]
    for parameter in held:
        found += optimizer.state[parameter].values()
    return found


def why_uncut(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> str:
    """Why the optimizer cannot be called for some rows of a parameter; empty where it can.

    Tried, on a small parameter: what it keeps may hang on how large one is, or on other rows.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            whole, parted = _tried_in_rows(make, [4]), _tried_in_rows(make, [3, 1])
        except Exception as error:  # noqa: BLE001 - an optimizer may fail in its own way
            return f"the optimizer fails on some rows of a parameter ({type(error).__name__})"
    same = len(whole) == len(parted) and all(map(_is_same, whole, parted))
    return "" if same else "the optimizer's step is another for some rows of a parameter"


# So wide that slices begin and end where the vectors of any processor do.
_PROBE_COLUMNS = 64


def _tried_in_rows(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], counts: Sequence[int]
) -> list[object]:
    """A parameter and its state after a few steps, so many rows at a time."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(sum(counts), _PROBE_COLUMNS, generator=generator, device="cpu")
    parameter = nn.Parameter(whole)
    optimizer = make([parameter])
    raw = _raw_step(optimizer)
    weights = list(whole.split(list(counts)))
    held: list[dict[str, Any] | None] = [None for _ in counts]
    for _ in range(_PROBE_STEPS):
        gradients = torch.randn(whole.shape, generator=generator, device="cpu").split(list(counts))
        groups, numbers = _Groups(optimizer), ScalarStates(held[0] or {})

        def update(groups: _Groups = groups) -> None:
            groups.choose(lambda _: True)
            raw(optimizer)

        with groups.put_back():
            for place, gradient in enumerate(gradients):
                before = held[place]
                own = None if before is None else {**before, **numbers.again()}
                held[place] = updated_rows(
                    optimizer, parameter, update,
                    weight=weights[place], gradient=gradient, kept=own,
                )  # fmt: skip
                weights[place] = parameter.data
    found: list[object] = [torch.cat(weights)]
    for group in optimizer.param_groups:
        found += [v for k, v in group.items() if k != "params"]
    for key, value in (held[-1] or {}).items():
        rows = [state[key] for state in held if state]
        is_large = isinstance(value, torch.Tensor) and value.numel() > 1
        found.append(torch.cat(rows) if is_large else value)
    return found


def _is_among(chosen: Collection[int], parameter: torch.Tensor) -> bool:
    return id(parameter) in chosen


def _is_same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
