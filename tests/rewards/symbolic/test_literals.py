"""Numbers in text have the value that they are written for."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_mega.rewards.symbolic.literals import read_literal


def value(text: str, thousands: bool = True) -> Fraction:
    literal = read_literal(text, 0, thousands)
    assert literal is not None
    assert literal.end == len(text)
    return literal.value


def long_division(numerator: int, denominator: int) -> tuple[str, str]:
    """The decimals of a fraction below one before its period, and its period."""
    seen: dict[int, int] = {}
    digits = ""
    remainder = numerator
    while remainder and remainder not in seen:
        seen[remainder] = len(digits)
        digit, remainder = divmod(10 * remainder, denominator)
        digits += str(digit)
    return (digits[: seen[remainder]], digits[seen[remainder] :]) if remainder else (digits, "")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 999), st.integers(1, 400), st.integers(2, 401))
def test_a_fraction_in_decimals_with_its_period_is_the_fraction(
    whole: int, numerator: int, denominator: int
) -> None:
    numerator %= denominator
    head, period = long_division(numerator, denominator)
    if not period:
        return
    expected = whole + Fraction(numerator, denominator)
    dotted = f"\\dot{{{period[0]}}}" + (
        f"{period[1:-1]}\\dot{{{period[-1]}}}" if len(period) > 1 else ""
    )
    for written in (f"\\overline{{{period}}}", f"({period})", dotted, f"{period * 3}\\ldots"):
        assert value(f"{whole}.{head}{written}") == expected


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**12))
def test_separators_of_thousands_change_nothing(number: int) -> None:
    for separator in (",", "{,}", "\\,", " ", ",\\!"):
        assert value(f"{number:,}".replace(",", separator)) == number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4.5e33", Fraction(45) * 10**32),
        ("1e-5", Fraction(1, 10**5)),
        (".5", Fraction(1, 2)),
        ("025", Fraction(25)),
    ],
)
def test_other_forms_of_numbers(text: str, expected: Fraction) -> None:
    assert value(text) == expected


@pytest.mark.parametrize("text", ["100,200", "1,234"])
def test_commas_can_also_separate_numbers(text: str) -> None:
    literal = read_literal(text, 0, thousands=False)
    assert literal is not None
    assert text[: literal.end] == text.partition(",")[0]


@pytest.mark.parametrize("text", ["27,54,108", "1234,567", "12,3456", "0,123"])
def test_numbers_that_are_not_grouped_by_thousands_are_several(text: str) -> None:
    literal = read_literal(text, 0, thousands=True)
    assert literal is not None
    assert text[: literal.end] == text.partition(",")[0]
