"""Encodes Python values that JSON lacks (tuples, infinities) as JSON, and decodes them.

Not for tensors, and never for anything that would have to be executed when it is read.
"""

import math
from typing import Any


class Unplain(ValueError):
    """The error for a value other than a number, a string, or a list, tuple or dict of such
    values.
    """


def to_plain(value: Any) -> Any:
    """Encode a value as JSON."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case list():
            return {"list": [to_plain(v) for v in value]}
        case tuple():
            return {"tuple": [to_plain(v) for v in value]}
        case dict() if all(isinstance(k, str) for k in value):
            return {"dict": {k: to_plain(v) for k, v in value.items()}}
    raise Unplain(f"a value of type {type(value).__name__} is not a plain value")


def from_plain(encoded: Any) -> Any:
    """Decode a value from JSON."""
    match encoded:
        case None | bool() | int() | float() | str():
            return encoded
        case {"float": "inf" | "-inf" | "nan" as text, **rest} if not rest:
            return float(text)
        case {"list": list(values), **rest} if not rest:
            return [from_plain(v) for v in values]
        case {"tuple": list(values), **rest} if not rest:
            return tuple(from_plain(v) for v in values)
        case {"dict": dict(values), **rest} if not rest:
            return {str(k): from_plain(v) for k, v in values.items()}
    raise Unplain(f"{str(encoded)[:60]!r} is not a valid value")
