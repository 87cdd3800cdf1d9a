"""Do the loss and the model's code still read what they read when they were captured?

A number that code takes from a global, a closure, a dict or an object is part of the graph for
good: changed later, it would be ignored. Watched are plain values that the code names, and those
of functions that it calls by name. Not for the attributes of modules themselves: see watch.py.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from steelyard.core.errors import Mismatch

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEPTH = 4
# Longer ones are data, which code goes through and does not name.
_LONGEST = 256
Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class Read:
    """A value as it was found: ``holder[key]``, or what the cell holds."""

    where: str
    holder: Mapping[str, Any] | list[Any] | CellType
    key: Any
    value: Any

    def now(self) -> Any:
        if isinstance(self.holder, CellType):
            return self.holder.cell_contents
        try:
            return self.holder[self.key]
        except LookupError:
            return _Gone()


class _Gone:
    def __repr__(self) -> str:
        return "gone"


class FrozenWatch:
    """Remembers what was read; ``check`` refuses a value that is another."""

    def __init__(self, reader: str, reads: Iterable[Read]) -> None:
        self._reader = reader
        self._reads = list({(id(r.holder), r.key): r for r in reads}.values())

    def check(self) -> None:
        for read in self._reads:
            now = read.now()
            if now is not read.value and (type(now) is not type(read.value) or now != read.value):
                was = f"was {read.value!r} and is {now!r}"
                raise Mismatch(
                    f"{read.where}, which the {self._reader} reads, {was}"[:200],
                    expected="the value of the captured step, which it would go on using",
                    remedy="plan again after changing it, or give it as a tensor in the batch",
                )


def read_by_loss(loss: Callable[..., Any]) -> Iterator[Read]:
    return _of_callable(loss, set(), _DEPTH)


def read_by_model(model: nn.Module) -> Iterator[Read]:
    """What its modules' classes name, and what lies in dicts, lists and objects that they hold."""
    seen: set[int] = set()
    names: dict[type, Names] = {}
    for path, module in model.named_modules():
        kind = type(module)
        if kind not in names:
            names[kind] = _named_in_class(kind)
            owner = next(c for c in kind.__mro__ if "forward" in vars(c))
            yield Read(f"forward of {kind.__qualname__}", vars(owner), "forward", kind.forward)
            yield from _of_callable(kind.forward, seen, _DEPTH)
        for key, value in vars(module).items():
            # What torch keeps of a module (its parameters, hooks and so on) is watch.py's.
            if key not in _BOOKKEEPING and not isinstance(value, _PLAIN):
                where = f"{path}.{key}".lstrip(".")
                yield from _of_value(where, vars(module), key, value, names[kind], seen, _DEPTH)


def _of_callable(function: Any, seen: set[int], depth: int) -> Iterator[Read]:
    if id(function) in seen or not depth:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        yield from _of_callable(function.func, seen, depth)
        for key, value in function.keywords.items():
            where = f"the argument {key}"
            yield from _of_value(where, function.keywords, key, value, None, seen, 2)
    elif isinstance(function, MethodType):
        yield from _of_callable(function.__func__, seen, depth)
        yield from _of_held("", function.__self__, None, seen, 1)
    elif isinstance(function, FunctionType):
        yield from _of_function(function, seen, depth)
    else:
        yield from _of_held("", function, None, seen, 1)
        name = "forward" if isinstance(function, nn.Module) else "__call__"
        yield from _of_callable(getattr(type(function), name, None), seen, depth)


def _of_function(function: FunctionType, seen: set[int], depth: int) -> Iterator[Read]:
    names = _named(function.__code__)
    given = function.__globals__
    found: list[tuple[str, Any, str, Any]]
    found = [(f"global {name}", given, name, given[name]) for name in names if name in given]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append((name, cell, name, cell.cell_contents))
        except ValueError:
            continue  # not assigned yet
    for where, holder, name, value in found:
        yield from _of_value(where, holder, name, value, names, seen, 2)
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield from _of_callable(value, seen, depth - 1)


def _of_value(
    where: str, holder: Any, key: Any, value: Any, names: Names | None, seen: set[int], depth: int
) -> Iterator[Read]:
    if isinstance(value, _PLAIN):
        yield Read(where, holder, key, value)
    elif depth and isinstance(value, (dict, list)) and len(value) <= _LONGEST:
        for entry, held in value.items() if isinstance(value, dict) else enumerate(value):
            if names is None or not isinstance(entry, str) or entry in names:
                at = f"{where}[{entry!r}]"
                yield from _of_value(at, value, entry, held, names, seen, depth - 1)
    elif not isinstance(value, _NO_HOLDER):
        yield from _of_held(where, value, names, seen, depth)


def _of_held(
    where: str, value: Any, names: Names | None, seen: set[int], depth: int
) -> Iterator[Read]:
    """Attributes that the code names; without names, all."""
    if not depth:
        return
    held = getattr(value, "__dict__", {})
    for key, attribute in held.items():
        if names is None or key in names:
            at = f"{where}.{key}".lstrip(".")
            yield from _of_value(at, held, key, attribute, names, seen, depth - 1)


def _named_in_class(kind: type) -> Names:
    """The names in its forward, and in those methods that it calls by name, and so on."""
    names: set[str] = set()
    pending = ["forward"]
    while pending:
        name = pending.pop()
        method: Any = getattr(kind, name, None)
        if method is getattr(nn.Module, name, None):
            continue
        method = method.fget if isinstance(method, property) else inspect.unwrap(method)
        if isinstance(method, FunctionType):
            new = _named(method.__code__) - names
            names |= new
            pending += new
    return frozenset(names)


def _named(code: CodeType) -> Names:
    within = [c for c in code.co_consts if isinstance(c, CodeType)]
    strings = [c for c in code.co_consts if isinstance(c, str)]
    return frozenset((*code.co_names, *strings)).union(*map(_named, within))


_BOOKKEEPING = frozenset(vars(nn.Module()))
_NO_HOLDER = (type, ModuleType, FunctionType, MethodType, nn.Module, torch.Tensor)
