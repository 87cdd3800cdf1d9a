"""The schema of a cluster file: the allowed keys of a device, a link and a scope.

Amounts are texts with a unit. Not for the meaning of the tables as a whole: see cluster_file.py.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from steelyard.errors import BudgetError
from steelyard.hardware.device import DTYPES
from steelyard.safe_files import STRICT
from steelyard.units import (
    parse_bytes,
    parse_flops,
    parse_line_rate,
    parse_price,
    parse_seconds,
    parse_share,
)

KINDS = ("device", "link", "scope")
_MOST = 1_000_000
_LARGEST = 2**62


def _parser_of(parse: Callable[..., float], what: str, example: str) -> Callable[[object], object]:
    def read(given: object) -> object:
        if isinstance(given, str) and re.search(r"[A-Za-z%]", given):
            return parse(given, what=what)
        if isinstance(given, str | int | float) and not isinstance(given, bool):
            raise BudgetError(
                f"{what} = {str(given)[:40]!r} has no unit",
                expected=f"a string such as {example}",
                remedy=f'write {what} = "{example}"',
            )
        return given

    return read


def _amount(parse: Callable[..., float], what: str, example: str) -> BeforeValidator:
    return BeforeValidator(_parser_of(parse, what, example))


_Bytes = Annotated[int, _amount(parse_bytes, "memory", "80 GiB"), Field(ge=1, le=_LARGEST)]
_Rate = Annotated[float, _amount(parse_line_rate, "rate", "450 GB/s"), Field(gt=0, le=_LARGEST)]
_Seconds = Annotated[float, _amount(parse_seconds, "time", "5 us"), Field(gt=0, le=3600)]
_Flops = Annotated[float, _amount(parse_flops, "peak", "989 TFLOP/s"), Field(gt=0)]
_Price = Annotated[float, _amount(parse_price, "price", "2.5 USD/h"), Field(gt=0)]
_Share = Annotated[float, _amount(parse_share, "share", "80 %"), Field(gt=0, le=1)]
_Doubt = Annotated[float, _amount(parse_share, "doubt", "50 %"), Field(ge=0, lt=1)]
_Count = Annotated[int, Field(ge=1, le=_MOST)]


def _read_point(given: object) -> object:
    """Parse ``["1 MiB", "120 us"]``; raise BudgetError for anything but a pair."""
    if not isinstance(given, list) or len(given) != 2:
        raise BudgetError(
            "a point of a curve must be a size and a time",
            expected='two strings such as ["1 MiB", "120 us"]',
            remedy="write both",
        )
    size, time = given
    read_size = _parser_of(parse_bytes, "size", "1 MiB")
    read_time = _parser_of(parse_seconds, "time", "120 us")
    return read_size(size), read_time(time)


_Point = Annotated[tuple[int, float], BeforeValidator(_read_point)]
# Sources of the figures: a title or an address, and what it says.
_Source = Annotated[list[str], Field(max_length=16)]


class Head(BaseModel):
    """The whole file; its tables are validated one by one later."""

    model_config = STRICT

    format: Annotated[int, Field(ge=1, le=1)] = 1
    preset: str | None = None
    device: dict[str, Any] = {}
    link: dict[str, Any] = {}
    scope: dict[str, Any] = {}


class PeakTable(BaseModel):
    """Dense peak rates, without sparsity."""

    model_config = STRICT

    float64: _Flops | None = None
    float32: _Flops
    tf32: _Flops | None = None
    float16: _Flops | None = None
    bfloat16: _Flops | None = None
    float8: _Flops | None = None
    int8: _Flops | None = None
    float4: _Flops | None = None

    def pairs(self) -> tuple[tuple[str, float], ...]:
        given = ((dtype, getattr(self, dtype)) for dtype in DTYPES)
        return tuple((dtype, flops) for dtype, flops in given if flops is not None)


_Names = Annotated[list[Annotated[str, Field(max_length=60)]], Field(min_length=1, max_length=32)]
_Least_And_Most = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)]
_Rows = Annotated[int, Field(ge=1, le=_MOST)]
_Error = Annotated[float, Field(ge=0, le=100)]


class DomainTable(BaseModel):
    """A set of published steps: see hardware/calibration.py."""

    model_config = STRICT

    rows: _Rows
    software: _Names
    models: _Names
    kinds: _Names
    precisions: _Names
    parameters: _Least_And_Most
    devices: _Least_And_Most


class ScoreTable(DomainTable):
    kind: str = ""
    inside: bool = False
    median_error: _Error
    high_error: _Error
    bias: Annotated[float, Field(ge=-1, le=100)]
    doubt: _Error | None = None
    worst_software: Annotated[str, Field(max_length=60)] = ""
    worst_error: _Error = 0.0


class PairsTable(BaseModel):
    model_config = STRICT

    count: _Rows
    high_error: _Error


class CalibrationTable(BaseModel):
    model_config = STRICT

    fitted: DomainTable
    score: Annotated[list[ScoreTable], Field(max_length=32)] = []
    alike: PairsTable | None = None
    unlike: PairsTable | None = None


class ReachedTable(BaseModel):
    """Achieved fractions of the rates, the steps to which they were fitted, and the error on
    others.
    """

    model_config = STRICT

    share: _Share
    attention: _Share = 1.0
    call: _Seconds | None = None
    fitted: Annotated[str, Field(max_length=200)] = ""
    error: _Share | None = None
    calibration: CalibrationTable | None = None


class DeviceTable(BaseModel):
    model_config = STRICT

    preset: str | None = None
    memory: _Bytes
    memory_bandwidth: _Rate
    peak: PeakTable
    host_memory: _Bytes | None = None
    host_link: str | None = None
    price: _Price | None = None
    # The time of a GPU launch in the driver. This is a declared value, since no vendor publishes
    # it.
    call: _Seconds = 5e-6
    reached: ReachedTable | None = None
    source: _Source = []


class LinkTable(BaseModel):
    model_config = STRICT

    preset: str | None = None
    rate: _Rate | None = None
    latency: _Seconds | None = None
    curve: Annotated[list[_Point], Field(max_length=1000)] | None = None
    doubt: _Doubt = 0.5
    source: _Source = []


class ScopeTable(BaseModel):
    model_config = STRICT

    preset: str | None = None
    members: dict[str, _Count]
    # The link between members, and the number of links per member.
    link: str | None = None
    ports: _Count = 1
    # The link that leaves this scope, unless the enclosing scope declares one.
    out_link: str | None = None
    out_ports: _Count = 1
    # Host memory of the whole scope, shared evenly by its devices.
    host_memory: _Bytes | None = None
    host_link: str | None = None
    price: _Price | None = None
    source: _Source = []
