"""Literal numbers in LaTeX text: 025, 1,234, 1{,}234, 4.5e33, 0.1\\overline{6}, 0.(3), 0.333\\ldots."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

MAX_DIGITS = 400

_START = re.compile(r"\d|\.\d|\.\\(?:overline|bar|dot)")
_SPACED_GROUPS = re.compile(r"\d{1,3}(?:(?:\{,\}|,\\!|\\[,;! ]|~| )\d{3})+(?!\d)")
_COMMA_GROUPS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)")
_DIGITS = re.compile(r"\d*")
_PERIOD = re.compile(
    r"\.(?P<head>\d*)(?:\\(?:overline|bar)\s*(?:\{(?P<bar>\d+)\}|(?P<digit>\d))"
    r"|\\dot\s*\{?(?P<first>\d)\}?(?:(?P<inner>\d*)\\dot\s*\{?(?P<last>\d)\}?)?"
    r"|\((?P<round>\d+)\))"
)
_DECIMALS = re.compile(r"\.(\d+)")
_ELLIPSIS = re.compile(r"\s*(?:\\[lc]?dots[cb]?(?![a-zA-Z])|\.\.\.)")
_EXPONENT = re.compile(r"[eE]([+-]?\d{1,3})(?!\d|\.\d|\^)")
_REPEATED_TAIL = re.compile(r"(?P<digit>\d)(?P=digit){2,}$|(?P<block>\d{2,})(?P=block)$")


class Literal(NamedTuple):
    """A number in text: its value, its decimal places as written (None without a decimal point) and where it ends."""

    value: Fraction
    places: int | None
    end: int


def read_literal(text: str, start: int, thousands: bool) -> Literal | None:
    """Read the number that begins at text[start]; None if none does.

    `thousands` reads 1,234 as one number; otherwise it is two. Groups set apart by {,} or by spaces
    are always one.
    """
    if not _START.match(text, start):
        return None
    whole, position = _whole_part(text, start, thousands)
    if period := _PERIOD.match(text, position):
        return Literal(
            _repeating(whole, period["head"], _period_digits(period)), None, period.end()
        )
    decimals = _DECIMALS.match(text, position)
    if decimals is None:
        return _with_exponent(text, Fraction(whole or "0"), None, position)
    digits, position = decimals[1], decimals.end()
    ellipsis = _ELLIPSIS.match(text, position)
    repeated = _REPEATED_TAIL.search(digits) if ellipsis else None
    if ellipsis and repeated:
        block = repeated["digit"] or repeated["block"]
        return Literal(_repeating(whole, digits[: repeated.start()], block), None, ellipsis.end())
    value = Fraction(f"{whole or '0'}.{digits}")
    if ellipsis:
        return Literal(value, len(digits), ellipsis.end())
    return _with_exponent(text, value, len(digits), position)


def may_be_list(text: str) -> bool:
    """Whether a number with commas in `text` could as well be several numbers: no group of it begins with 0."""
    return not re.search(r",0\d\d(?!\d)", text)


def _whole_part(text: str, start: int, thousands: bool) -> tuple[str, int]:
    """The digits before the decimal point, and where they end."""
    groups = _SPACED_GROUPS.match(text, start)
    after_comma = re.fullmatch(r"\d,", text[max(start - 2, 0) : start])
    if groups is None and thousands and not after_comma:
        groups = _COMMA_GROUPS.match(text, start)
    if groups is not None:
        return re.sub(r"\D", "", groups[0]), groups.end()
    end = _DIGITS.match(text, start).end()  # type: ignore[union-attr]  # matches the empty text
    return text[start:end], end


def _period_digits(period: re.Match[str]) -> str:
    if period["first"]:
        return period["first"] + (period["inner"] or "") + (period["last"] or "")
    return period["bar"] or period["digit"] or period["round"]


def _repeating(whole: str, head: str, block: str) -> Fraction:
    """The number whole.head followed by `block` for ever."""
    scale = 10 ** len(head)
    tail = Fraction(int(block), (10 ** len(block) - 1) * scale)
    return Fraction(f"{whole or '0'}.{head or '0'}") + tail


def _with_exponent(text: str, value: Fraction, places: int | None, position: int) -> Literal:
    """The number with an exponent such as e33, which makes it a decimal."""
    exponent = _EXPONENT.match(text, position)
    if exponent is None:
        return Literal(value, places, position)
    power = int(exponent[1])
    return Literal(value * Fraction(10) ** power, (places or 0) - power, exponent.end())
