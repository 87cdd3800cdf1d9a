"""Writes YAML for files that are exported: mappings, lists, scalars and blocks of lines.

A writer of thirty lines instead of PyYAML, which Steelyard does not need otherwise. Not for reading
YAML.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Union

Scalar = str | int | float | bool | None
YamlValue = Union[Scalar, Sequence["YamlValue"], Mapping[str, "YamlValue"]]  # noqa: UP007 - recursive

# Other words may mean a number, a date or a truth value to some reader, and are quoted.
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_RESERVED = {"no", "yes", "on", "off", "true", "false", "null", "y", "n"}


def to_yaml(document: Mapping[str, YamlValue], *, comment: Sequence[str] = ()) -> str:
    """Return the document in YAML, below the lines of a comment."""
    lines = [f"# {line}".rstrip() for line in comment]
    return "\n".join([*lines, *_mapping(document, "")]) + "\n"


def _mapping(document: Mapping[str, YamlValue], indent: str) -> Iterator[str]:
    for key, value in document.items():
        yield from _entry(f"{indent}{_scalar(key)}:", value, indent)


def _entry(head: str, value: YamlValue, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield head if value else f"{head} {{}}"
        yield from _mapping(value, f"{indent}  ")
    elif isinstance(value, str) and "\n" in value:
        yield f"{head} |"
        yield from (f"{indent}  {line}".rstrip() for line in value.rstrip("\n").split("\n"))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield head if value else f"{head} []"
        for item in value:
            yield from _item(item, f"{indent}  ")
    else:
        yield f"{head} {_scalar(value)}"


def _item(value: YamlValue, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        first, *others = _mapping(value, f"{indent}  ")
        yield f"{indent}- {first.lstrip()}"
        yield from others
    else:
        assert not isinstance(value, Sequence) or isinstance(value, str), "lists of lists"
        yield f"{indent}- {_scalar(value)}"


def _scalar(value: Scalar) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    return json.dumps(value)  # JSON is YAML
