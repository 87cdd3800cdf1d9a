"""The tables of a cluster file, key by key: what may be said of a device, a link and a scope.

Amounts are texts with a unit, as people write them. Not for what the tables mean together: see
cluster_file.py.
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


def _reading(parse: Callable[..., float], what: str, example: str) -> Callable[[object], object]:
    def read(given: object) -> object:
        if isinstance(given, str) and re.search(r"[A-Za-z%]", given):
            return parse(given, what=what)
        if isinstance(given, str | int | float) and not isinstance(given, bool):
            raise BudgetError(
                f"{what} = {str(given)[:40]!r} has no unit",
                expected=f"a text such as {example}",
                remedy=f'write {what} = "{example}"',
            )
        return given

    return read


def _written(parse: Callable[..., float], what: str, example: str) -> BeforeValidator:
    return BeforeValidator(_reading(parse, what, example))


_Bytes = Annotated[int, _written(parse_bytes, "memory", "80 GiB"), Field(ge=1, le=_LARGEST)]
_Rate = Annotated[float, _written(parse_line_rate, "rate", "450 GB/s"), Field(gt=0, le=_LARGEST)]
_Seconds = Annotated[float, _written(parse_seconds, "time", "5 us"), Field(gt=0, le=3600)]
_Flops = Annotated[float, _written(parse_flops, "peak", "989 TFLOP/s"), Field(gt=0)]
_Price = Annotated[float, _written(parse_price, "price", "2.5 USD/h"), Field(gt=0)]
_Share = Annotated[float, _written(parse_share, "share", "80 %"), Field(gt=0, le=1)]
_Doubt = Annotated[float, _written(parse_share, "doubt", "50 %"), Field(ge=0, lt=1)]
_Count = Annotated[int, Field(ge=1, le=_MOST)]


def _read_point(given: object) -> object:
    """``["1 MiB", "120 us"]``; what is no such pair is left for the type to refuse."""
    if not isinstance(given, list) or len(given) != 2:
        raise BudgetError(
            "a point of a curve is a size and a time",
            expected='two texts such as ["1 MiB", "120 us"]',
            remedy="write both",
        )
    size, time = given
    read_size = _reading(parse_bytes, "size", "1 MiB")
    read_time = _reading(parse_seconds, "time", "120 us")
    return read_size(size), read_time(time)


_Point = Annotated[tuple[int, float], BeforeValidator(_read_point)]
# Where figures are from: a title or an address, and what stands there.
_Source = Annotated[list[str], Field(max_length=16)]


class Head(BaseModel):
    """All of the file; what is in its tables is looked at one by one."""

    model_config = STRICT

    format: Annotated[int, Field(ge=1, le=1)] = 1
    preset: str | None = None
    device: dict[str, Any] = {}
    link: dict[str, Any] = {}
    scope: dict[str, Any] = {}


class PeakTable(BaseModel):
    """Dense, without sparsity."""

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
    """Published steps: see hardware/calibration.py."""

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
    """Of the rates, by programs; fitted ones say on what steps, and how far off others were."""

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
    # What a launch costs a GPU's driver; declared, for nobody publishes it.
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
    # What joins the members, and how many of it each has.
    link: str | None = None
    ports: _Count = 1
    # What leads out of this scope, where the one around it does not say.
    out_link: str | None = None
    out_ports: _Count = 1
    # Of the whole, shared evenly by its devices.
    host_memory: _Bytes | None = None
    host_link: str | None = None
    price: _Price | None = None
    source: _Source = []
