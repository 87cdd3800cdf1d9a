"""Does the loss function still read what it read when it was captured?

A number that it takes from a global, a closure or an object is part of the graph for good: changed
later, it would be ignored. Watched are plain values that its code names, and those of functions
that it calls by name. Not for the model's own attributes: see watch.py.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from steelyard.core.errors import Mismatch

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEPTH = 4


@dataclass(frozen=True, slots=True)
class _Read:
    where: str
    holder: Mapping[str, Any] | CellType
    key: Any
    value: Any

    def now(self) -> Any:
        if isinstance(self.holder, CellType):
            return self.holder.cell_contents
        return self.holder.get(self.key)


class LossWatch:
    def __init__(self, loss: Callable[..., Any]) -> None:
        self._reads = list(_reads(loss, set(), _DEPTH))

    def check(self) -> None:
        for read in self._reads:
            now = read.now()
            if now is not read.value and (type(now) is not type(read.value) or now != read.value):
                raise Mismatch(
                    f"{read.where}, which the loss reads, was {read.value!r} and is {now!r}"[:200],
                    expected="the value of the captured step, which it would go on using",
                    remedy="plan again after changing it, or give it as a tensor in the batch",
                )


def _reads(loss: Any, seen: set[int], depth: int) -> Iterator[_Read]:
    if id(loss) in seen or not depth:
        return
    seen.add(id(loss))
    if isinstance(loss, functools.partial):
        yield from _reads(loss.func, seen, depth)
        for key, value in loss.keywords.items():
            yield from _of_value(f"the argument {key}", loss.keywords, key, value, None)
    elif isinstance(loss, MethodType):
        yield from _reads(loss.__func__, seen, depth)
        yield from _of_object("", loss.__self__, None)
    elif isinstance(loss, FunctionType):
        yield from _of_function(loss, seen, depth)
    else:
        yield from _of_object("", loss, None)
        name = "forward" if isinstance(loss, nn.Module) else "__call__"
        yield from _reads(getattr(type(loss), name, None), seen, depth)


def _of_function(function: FunctionType, seen: set[int], depth: int) -> Iterator[_Read]:
    code = function.__code__
    for name in code.co_names:
        if name in function.__globals__:
            value = function.__globals__[name]
            yield from _of_value(f"global {name}", function.__globals__, name, value, function)
            if isinstance(value, FunctionType) and value.__module__ == function.__module__:
                yield from _reads(value, seen, depth - 1)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
        yield from _of_value(name, cell, name, value, function)
        if isinstance(value, FunctionType):
            yield from _reads(value, seen, depth - 1)


def _of_value(
    where: str, holder: Any, key: str, value: Any, function: FunctionType | None
) -> Iterator[_Read]:
    if isinstance(value, _PLAIN):
        yield _Read(where, holder, key, value)
    elif type(value) is dict:
        wanted = set(value) if function is None else set(value) & set(_strings(function))
        for entry in wanted:
            if isinstance(value[entry], _PLAIN):
                yield _Read(f"{where}[{entry!r}]", value, entry, value[entry])
    elif not isinstance(value, (type, ModuleType, FunctionType, nn.Module)):
        yield from _of_object(where, value, function)


def _of_object(where: str, value: Any, function: FunctionType | None) -> Iterator[_Read]:
    """Attributes that the code names; of the loss itself, all."""
    held = getattr(value, "__dict__", {})
    for key, attribute in held.items():
        named = function is None or key in function.__code__.co_names
        if named and isinstance(attribute, _PLAIN):
            yield _Read(f"{where}.{key}".lstrip("."), held, key, attribute)


def _strings(function: FunctionType) -> Iterator[str]:
    return (c for c in function.__code__.co_consts if isinstance(c, str))
