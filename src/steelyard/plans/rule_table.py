"""The base class of the tables for rules in a plan file, and the types of their keys.

Each trade declares its own table with its offers. Not for reading a file: see plan_files/.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, Field

from steelyard.ir.rule import Rule
from steelyard.safe_files import STRICT
from steelyard.units import parse_bytes

MOST_RULES = 50_000
MOST_PARAMETERS = 100_000
MOST_RANKS = 1_000_000
LARGEST = 2**62


class _Omitted:
    """Marks a key that is not written if it has its default value."""


OMITTED = _Omitted()

Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Ranks = Annotated[int, Field(ge=2, le=MOST_RANKS, alias="ranks")]
Parameter = Annotated[str, Field(alias="parameter")]


def written(parse: Callable[..., float], what: str) -> BeforeValidator:
    """Return a validator that parses amounts with units; numbers pass unchanged."""
    return BeforeValidator(lambda given: parse(given, what=what) if type(given) is str else given)


Bytes = Annotated[int, written(parse_bytes, "memory"), Field(ge=1, le=LARGEST)]
BytesOrNone = Annotated[int, written(parse_bytes, "memory"), Field(ge=0, le=LARGEST)]


def as_tuple(given: object) -> object:
    """Turn a TOML list into a tuple, which can be hashed."""
    return tuple(given) if isinstance(given, list) else given


class RuleTable(BaseModel):
    """One table of a plan file; its fields are fields of Rule, their aliases the keys.

    ``most`` is the maximum number of tables of its kind in a file.
    """

    model_config = STRICT
    most: ClassVar[int] = 1

    @classmethod
    def problems(cls, rules: Sequence[Rule]) -> list[str]:  # noqa: ARG003 - none by default
        """Return errors of rules that are valid one by one, but not together."""
        return []

    @classmethod
    def omits(cls, field: str, value: object) -> bool:
        """True if the key is left out of a file because it has its default value."""
        info = cls.model_fields[field]
        return OMITTED in info.metadata and value == info.default


class CallTable(RuleTable):
    """The forward values that one call makes, in as many modules as ``count``."""

    most: ClassVar[int] = MOST_RULES

    module: str
    op: str
    nth: Whole = 0
    count: Positive = 1
