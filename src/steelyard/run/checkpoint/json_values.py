"""Python values that JSON has no spelling for (tuples, infinities), spelt in JSON and read back.

Not for tensors, and never for anything that would have to be run to be read.
"""

import math
from typing import Any


class Unplain(ValueError):
    """A value that is neither a number, a string, a list, a tuple nor a dict of such."""


def to_plain(value: Any) -> Any:
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
    raise Unplain(f"a value of type {type(value).__name__} is no plain value")


def from_plain(spelt: Any) -> Any:
    match spelt:
        case None | bool() | int() | float() | str():
            return spelt
        case {"float": "inf" | "-inf" | "nan" as text, **rest} if not rest:
            return float(text)
        case {"list": list(values), **rest} if not rest:
            return [from_plain(v) for v in values]
        case {"tuple": list(values), **rest} if not rest:
            return tuple(from_plain(v) for v in values)
        case {"dict": dict(values), **rest} if not rest:
            return {str(k): from_plain(v) for k, v in values.items()}
    raise Unplain(f"no value is spelt {str(spelt)[:60]!r}")
