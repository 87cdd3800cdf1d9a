"""Parsing and formatting of amounts: bytes, seconds, rates, shares.

Not for arithmetic on amounts: see ir/metrics.py.
"""

import math
import re
from collections.abc import Callable
from typing import TypeVar

from steelyard.errors import BudgetError

_BYTES = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
# Units of network rates. As with bytes, upper and lower case mean the same.
_LINE_UNITS = {**_BYTES, "bit": 1 / 8, "kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9}
_FLOPS = {"flop": 1.0, "mflop": 1e6, "gflop": 1e9, "tflop": 1e12, "pflop": 1e15}
_COUNTS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_AMOUNT = re.compile(r"\s*([+-]?[0-9_]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)\s*")


def parse_bytes(amount: str | int | float, *, what: str = "memory") -> int:
    """Parse ``"2 GiB"`` to 2147483648; a bare number is bytes."""
    example = "300MiB or 2 GiB"
    found = _parse(amount, _BYTES, what=what, example=example, bare=1.0)
    nbytes = int(found)
    # A bare 2.5 must have been meant in another unit; with "0.1 GiB", the fraction of a byte may be
    # dropped.
    if nbytes != found and _is_bare(amount):
        raise _impossible(
            amount, what=what, example=example, expected="a whole number of bytes, or a unit"
        )
    if nbytes == 0:
        raise _impossible(amount, what=what, example=example, expected="at least one byte")
    return nbytes


def _is_bare(amount: str | int | float) -> bool:
    """True for a number without a unit."""
    try:
        float(amount)
    except ValueError:
        return False
    return True


def parse_seconds(amount: str | int | float, *, what: str = "step_time") -> float:
    """Parse ``"120 ms"`` to 0.12; a bare number is seconds."""
    return _parse(amount, _SECONDS, what=what, example="120ms or 1.5 s", bare=1.0)


def parse_rate(amount: str | int | float, *, what: str = "rate") -> float:
    """Parse ``"500 MB/s"`` to 5e8; a bare number is bytes per second."""
    example = "500MB/s or 1 GiB/s"
    text = str(amount).strip().lower().removesuffix("/s") if isinstance(amount, str) else amount
    return _parse(text, _BYTES, what=what, example=example, bare=1.0)


def parse_line_rate(amount: str, *, what: str = "rate") -> float:
    """Parse ``"450 GB/s"`` to 4.5e11 and ``"100 Gbit/s"`` to 1.25e10, in bytes per second.

    ``Gb/s`` is refused: it means bits to networks and bytes to many people.
    """
    example = "450 GB/s or 100 Gbit/s"
    if re.search(r"[kKmMgGtT]b(ps|/s)?\s*$", str(amount)):
        raise BudgetError(
            f"{what} = {amount[:40]!r} may be bits or bytes",
            expected="an unambiguous unit: Gbit/s or GB/s",
            remedy=f"write {what} as {example}",
        )
    return _parse(
        _per(amount, "s", what=what, example=example), _LINE_UNITS, what=what, example=example
    )


def parse_flops(amount: str, *, what: str = "peak") -> float:
    """Parse ``"989 TFLOP/s"`` to 9.89e14."""
    example = "989 TFLOP/s"
    per_second = _per(amount, "s", what=what, example=example)
    return _parse(per_second, _FLOPS, what=what, example=example)


def parse_price(amount: str, *, what: str = "price") -> float:
    """Parse ``"2.5 USD/h"`` to 2.5."""
    example = "2.5 USD/h"
    hourly = _per(amount, "h", what=what, example=example)
    return _parse(hourly, {"usd": 1.0}, what=what, example=example)


def _per(amount: str, time: str, *, what: str, example: str) -> str:
    """Return the amount without its required suffix ``/s`` or ``/h``."""
    text = amount.strip()
    if not text.lower().endswith(f"/{time}"):
        raise BudgetError(
            f"{what} = {amount[:40]!r} does not end in /{time}",
            expected=f"an amount per time, such as {example}",
            remedy=f"write {what} as {example}",
        )
    return text[: -len(time) - 1]


def parse_count(amount: str | int | float, *, what: str = "count") -> int:
    """Parse ``"300B"`` to 300_000_000_000; a bare number is that many."""
    return round(_parse(amount, _COUNTS, what=what, example="300B or 1.5T", bare=1.0))


def parse_share(amount: str | int | float, *, what: str = "accuracy_loss") -> float:
    """Parse ``"0.5%"`` to 0.005; a bare number is the share itself. Zero is allowed."""
    units = {"%": 0.01}
    share = _parse(amount, units, what=what, example="0.5% or 0.005", bare=1.0, zero=True)
    if share > 1:
        raise BudgetError(
            f"{what} = {str(amount)[:40]!r} is {share * 100:g} %, more than 100 %",
            expected="at most 100 %; a number without a unit is a share, and 1 is 100 %",
            remedy=f"write {what} as 0.5% or 0.005",
        )
    return share


def _parse(
    amount: str | int | float,
    units: dict[str, float] | dict[str, int],
    *,
    what: str,
    example: str,
    bare: float = 1.0,
    zero: bool = False,
) -> float:
    # In the worst case, matching the pattern takes quadratic time; no valid amount is that long.
    match = _AMOUNT.fullmatch(str(amount)) if len(str(amount)) <= 64 else None
    if match is None or isinstance(amount, bool):
        raise BudgetError(
            f"{what} = {str(amount)[:40]!r} is not an amount",
            expected=f"a number with a unit, such as {example}",
            remedy=f"write {what} as {example}",
        )
    unit = match[2].lower()
    if unit and unit not in units:
        names = ", ".join(_unit_name(u) for u in units)
        raise BudgetError(
            f"{what} = {str(amount)[:40]!r} has the unknown unit {match[2][:20]!r}",
            expected=f"one of {names}",
            remedy=f"write {what} as {example}",
        )
    value = float(match[1].replace("_", "")) * (units[unit] if unit else bare)
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero) or value > 2**62:
        expected = f"a {'non-negative' if zero else 'positive'}, finite amount"
        raise _impossible(amount, what=what, example=example, expected=expected)
    return value


def _impossible(amount: object, *, what: str, example: str, expected: str) -> BudgetError:
    return BudgetError(
        f"{what} = {str(amount)[:40]!r} is not a possible amount",
        expected=expected,
        remedy=f"write {what} as {example}",
    )


def spell_bytes(amount: int) -> str | int:
    """Return a text such as ``"300 MiB"`` if it is exact, otherwise the bare number."""
    units = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return _spell(amount, units, parse_bytes)


def spell_rate(amount: float) -> str | float:
    """Return a text such as ``"500 MB/s"`` if it is exact, otherwise the bare number."""
    units = (("GB/s", 1e9), ("MB/s", 1e6), ("KB/s", 1e3))
    return _spell(amount, units, parse_rate)


def spell_seconds(amount: float) -> str | float:
    """Return a text such as ``"120 ms"`` if it is exact, otherwise the bare number."""
    return _spell(amount, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)), parse_seconds)


def spell_share(amount: float) -> str | float:
    """Return a text such as ``"0.5 %"`` if it is exact, otherwise the bare number."""
    return _spell(amount, (("%", 0.01),), parse_share)


_Number = TypeVar("_Number", int, float)


def _spell(
    amount: _Number, units: tuple[tuple[str, float], ...], parse: Callable[[str], _Number]
) -> str | _Number:
    for unit, size in units:
        text = f"{amount / size:g} {unit}"
        if "e" not in text and (amount >= size or unit == "%") and parse(text) == amount:
            return text
    return amount


def _unit_name(unit: str) -> str:
    return unit if unit in _SECONDS or unit == "%" else unit.upper().replace("IB", "iB")


def format_bytes(amount: float) -> str:
    """Format with three significant digits: ``5.80 GiB``, ``301 MiB``."""
    sign, amount = ("-", -amount) if amount < 0 else ("", amount)
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= 0.9995 * size:
            return f"{sign}{_three_digits(amount / size)} {unit}"
    return f"{sign}{amount:.0f} B"


def format_seconds(amount: float) -> str:
    """Format with three significant digits: ``1.41 s``, ``38.0 ms``, ``12.0 us``."""
    sign, amount = ("-", -amount) if amount < 0 else ("", amount)
    if amount == 0:
        return "0 s"
    if amount >= 7200:
        return f"{sign}{_three_digits(amount / 3600)} h"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if amount >= 0.9995 * size:
            return f"{sign}{_three_digits(amount / size)} {unit}"
    return f"{sign}{_three_digits(amount / 1e-9)} ns"


def format_share(amount: float) -> str:
    """Format a signed change: ``+2.0 %``."""
    return f"{amount * 100:+z.1f} %"


def _three_digits(amount: float) -> str:
    if amount >= 99.95:
        return f"{amount:.0f}"
    return f"{amount:.1f}" if amount >= 9.995 else f"{amount:.2f}"
