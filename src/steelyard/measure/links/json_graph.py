"""Graphs, devices and what they are made of as JSON, for a process that another one started.

Not for files: those have formats of their own, see plan_files/plan_file.py and
plan_files/prediction_file.py.
"""

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from steelyard.hardware.device import Device
from steelyard.hardware.efficiency import AchievedFraction
from steelyard.hardware.link import Link
from steelyard.ir.collective import Collective, Exchange
from steelyard.ir.graph import (
    Axis,
    BlockRun,
    Body,
    CountedMean,
    Graph,
    Node,
    Output,
    OutputKind,
    Phase,
    Ref,
    Role,
    SlicedValue,
    Storage,
    Symbol,
    Tensor,
)

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Axis, BlockRun, Body, Collective, CountedMean, Device, Exchange, Graph, Link, Node, Output,
        OutputKind, Phase, AchievedFraction, Ref, Role, SlicedValue, Storage, Symbol, Tensor,
    )
}  # fmt: skip


def to_json(value: Any) -> str:
    """A value of the kinds above, of tuples of them and of plain numbers and texts."""
    return json.dumps(_spelled(value))


def from_json(text: str | bytes) -> Any:
    """What ``to_json`` wrote; raises ValueError for anything else, and builds no other classes."""
    try:
        return _read(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no value that was spelled as JSON: {error!r}") from error


def _spelled(value: Any) -> Any:
    """Tuples are arrays; all else that JSON lacks is an object with the name of its kind."""
    if isinstance(value, Enum):
        return {type(value).__name__: value.value}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, tuple):
        return [_spelled(each) for each in value]
    assert is_dataclass(value), f"a {type(value).__name__} cannot be spelled"
    assert type(value).__name__ in _KINDS, f"a {type(value).__name__} cannot be spelled"
    return {type(value).__name__: {f.name: _spelled(getattr(value, f.name)) for f in fields(value)}}


def _read(found: Any) -> Any:
    if isinstance(found, list):
        return tuple(_read(each) for each in found)
    if not isinstance(found, dict):
        return found
    ((name, given),) = found.items()
    if name == "complex":
        return complex(*given)
    kind = _KINDS[name]
    if issubclass(kind, Enum):
        return kind(given)
    return kind(**{key: _read(each) for key, each in given.items()})
