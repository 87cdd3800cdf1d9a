"""Encodes graphs, devices and their parts as JSON, to send them to a child process.

Not for the files of users, which have their own formats: see plan_files/plan_file.py and
plan_files/prediction_file.py.
"""

import json
from collections.abc import Mapping
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

Kinds = Mapping[str, type[Any]]
KINDS: Kinds = {
    kind.__name__: kind
    for kind in (
        Axis, BlockRun, Body, Collective, CountedMean, Device, Exchange, Graph, Link, Node, Output,
        OutputKind, Phase, AchievedFraction, Ref, Role, SlicedValue, Storage, Symbol, Tensor,
    )
}  # fmt: skip


def to_json(value: Any, *, kinds: Kinds = KINDS) -> str:
    """Return the JSON of a value of these kinds, tuples, numbers and texts."""
    return json.dumps(_encode(value, kinds))


def from_json(text: str | bytes, *, kinds: Kinds = KINDS) -> Any:
    """Return the value that ``to_json`` encoded; raise ValueError for anything else.

    It creates no objects of other classes.
    """
    try:
        return _decode(json.loads(text), kinds)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"an invalid graph in JSON: {error!r}") from error


def _encode(value: Any, kinds: Kinds) -> Any:
    """Encode tuples as arrays, and other values that JSON lacks as objects with the name of their
    kind.
    """
    if isinstance(value, Enum):
        return {type(value).__name__: value.value}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, tuple):
        return [_encode(each, kinds) for each in value]
    name = type(value).__name__
    assert is_dataclass(value), f"a {name} cannot be written as JSON"
    assert name in kinds, f"a {name} cannot be written as JSON"
    return {name: {f.name: _encode(getattr(value, f.name), kinds) for f in fields(value)}}


def _decode(encoded: Any, kinds: Kinds) -> Any:
    if isinstance(encoded, list):
        return tuple(_decode(each, kinds) for each in encoded)
    if not isinstance(encoded, dict):
        return encoded
    ((name, content),) = encoded.items()
    if name == "complex":
        return complex(*content)
    kind = kinds[name]
    if issubclass(kind, Enum):
        return kind(content)
    return kind(**{key: _decode(each, kinds) for key, each in content.items()})
