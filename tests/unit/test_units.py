"""Amounts: written amounts are parsed as meant, and printed ones can be compared."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import BudgetError
from steelyard.units import (
    format_bytes,
    format_seconds,
    format_share,
    parse_bytes,
    parse_seconds,
    parse_share,
    spell_bytes,
    spell_seconds,
    spell_share,
)

BYTES = st.integers(1, 2**62)
SECONDS = st.floats(0, 2.0**62, exclude_min=True, allow_subnormal=True)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2 GiB", 2**31),
        ("300MiB", 300 * 2**20),
        ("1.5gib", 3 * 2**29),
        ("300MB", 300 * 10**6),
        (" 7 B ", 7),
        ("1_000", 1000),
        ("2e3", 2000),
        (4096, 4096),
        (1e6, 10**6),
    ],
)
def test_bytes_are_parsed(written: str | float, meant: int) -> None:
    assert parse_bytes(written) == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [("120 ms", 0.12), ("1.5 s", 1.5), ("2min", 120.0), ("3us", 3e-6), (0.25, 0.25)],
)
def test_seconds_are_parsed(written: str | float, meant: float) -> None:
    assert parse_seconds(written) == pytest.approx(meant, rel=1e-12)


def test_shares_are_parsed() -> None:
    assert parse_share("0.5%") == pytest.approx(0.005)
    assert parse_share(0) == 0.0
    assert parse_share("100%") == parse_share(1) == 1.0
    with pytest.raises(BudgetError, match="500 %, more than 100 %"):
        parse_share("5")


@pytest.mark.parametrize(
    "written",
    ["", "2 gigs", "-1", "0", "0.4 B", "nan", "inf", "1e99", "1e400", "GiB", "2 GiB or so",
     "1,5 GiB", "0x10", "٣ GiB", "9" * 5000, "1" * 64 + "x", True],
)  # fmt: skip
def test_an_invalid_number_of_bytes_is_refused_in_three_lines(written: str) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_bytes(written)
    said = str(caught.value)
    assert said.count("\n") == 2
    assert len(said) < 300
    assert "300MiB or 2 GiB" in caught.value.remedy


def test_a_misspelt_unit_is_named_with_those_that_exist() -> None:
    with pytest.raises(BudgetError, match="'gigs'") as caught:
        parse_bytes("2 gigs")
    assert "MiB" in caught.value.expected


@settings(deadline=None)
@given(st.text(max_size=80))
def test_any_text_is_an_amount_or_a_budget_error(text: str) -> None:
    for parse in (parse_bytes, parse_seconds, parse_share):
        with suppress(BudgetError):
            assert parse(text) >= 0


@settings(deadline=None)
@given(BYTES)
def test_formatted_bytes_parse_to_the_same(amount: int) -> None:
    spelled = spell_bytes(amount)
    assert spelled == amount or (isinstance(spelled, str) and parse_bytes(spelled) == amount)


@settings(deadline=None)
@given(SECONDS)
def test_formatted_seconds_parse_to_the_same(amount: float) -> None:
    spelled = spell_seconds(amount)
    assert spelled == amount or (isinstance(spelled, str) and parse_seconds(spelled) == amount)


@settings(deadline=None)
@given(st.floats(0, 1))
def test_formatted_shares_parse_to_the_same(amount: float) -> None:
    spelled = spell_share(amount)
    assert spelled == amount or (isinstance(spelled, str) and parse_share(spelled) == amount)


def test_amounts_are_formatted_as_people_write_them() -> None:
    assert spell_bytes(300 * 2**20) == "300 MiB"
    assert spell_bytes(3 * 2**29) == "1.5 GiB"
    assert spell_bytes(300 * 2**20 + 1) == 300 * 2**20 + 1
    assert spell_seconds(0.12) == "120 ms"
    assert spell_share(0.005) == "0.5 %"


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (300 * 2**20, "300 MiB"),
        (5.8 * 2**30, "5.80 GiB"),
        (1023.9 * 2**20, "1.00 GiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_bytes_are_printed(amount: float, shown: str) -> None:
    assert format_bytes(amount) == shown


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(0, "0 s"), (1.41, "1.41 s"), (0.038, "38.0 ms"), (12e-6, "12.0 us"), (7200, "2.00 h")],
)
def test_seconds_are_printed(amount: float, shown: str) -> None:
    assert format_seconds(amount) == shown


def test_shares_are_printed_with_a_sign_and_never_as_minus_zero() -> None:
    assert format_share(0.02) == "+2.0 %"
    assert format_share(-0.0001) == "+0.0 %"


@settings(deadline=None)
@given(BYTES)
def test_shown_bytes_are_right_to_three_figures(amount: int) -> None:
    # The error is at most half of the third figure, plus less than a byte that parsing cuts off.
    assert abs(parse_bytes(format_bytes(amount)) - amount) <= 0.005 * amount + 1
