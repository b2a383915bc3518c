"""When a decimal stands for a number: exactly, to six decimal places or more, or but for
floating-point noise.

0.333333 is 1/3 and 0.3333 is not; 1.0 is not 1 - 2^-98, and neither is 0.999999999: a rounding says
nothing about a number that is itself almost an integer.
"""

from __future__ import annotations

from fractions import Fraction
from math import trunc
from typing import NamedTuple

from mpmath import libmp

from spiral_mega.rewards.symbolic.equality import equal, number
from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.evaluate import Value
from spiral_mega.rewards.symbolic.nodes import Apply, Node, Number, free_symbols

_MIN_PLACES = 6
_MIN_DIGITS = 5
_FLOAT_DIGITS = 16
_SHORT_DIGITS = 12
_FLOAT_NOISE = Fraction(1, 10**15)
_FAR_FROM_INTEGER = 10_000
_MAX_PLACES = 45  # `number` has 50 digits or more


class Decimal(NamedTuple):
    """A decimal as written: its value, its places after the point without trailing zeros, and its digits."""

    value: Fraction
    places: int
    digits: int


def equal_numbers(gold: Node, given: Node) -> bool:
    """Whether two expressions without variables are the same number, or one is a decimal that stands for the other."""
    if equal(gold, given):
        return True
    gold_decimal, given_decimal = decimal(gold), decimal(given)
    if gold_decimal is not None and given_decimal is not None:
        return _close_decimals(gold_decimal, given_decimal)
    if gold_decimal is not None:
        return _stands_for(gold_decimal, given)
    return given_decimal is not None and _stands_for(given_decimal, gold)


def decimal(node: Node) -> Decimal | None:
    """The decimal that a node is as written, such as 0.5, -0.5 and 8.7 \\times 10^8; None for anything else."""
    if isinstance(node, Number):
        return None if node.places is None else _decimal(node.value, node.places)
    if not isinstance(node, Apply):
        return None
    if node.function == "neg":
        inner = decimal(node.arguments[0])
        return None if inner is None else inner._replace(value=-inner.value)
    if (
        node.function != "mul"
        or not isinstance(node.arguments[0], Number)
        or node.arguments[0].places is None
    ):
        return None
    power = _power_of_ten(node.arguments[1])
    if power is None:
        return None
    mantissa = node.arguments[0]
    return _decimal(mantissa.value * Fraction(10) ** power, mantissa.places - power)  # type: ignore[operator]


def _decimal(value: Fraction, places: int) -> Decimal:
    """Without the zeros at its end."""
    scaled = value * Fraction(10) ** places
    digits = abs(scaled.numerator)
    while digits and digits % 10 == 0:
        digits //= 10
        places -= 1
    return Decimal(value, places, len(str(digits)))


def _power_of_ten(node: Node) -> int | None:
    if node == Number(Fraction(10)):
        return 1
    if (
        not isinstance(node, Apply)
        or node.function != "pow"
        or node.arguments[0] != Number(Fraction(10))
    ):
        return None
    exponent = node.arguments[1]
    sign = 1
    if isinstance(exponent, Apply) and exponent.function == "neg":
        sign, exponent = -1, exponent.arguments[0]
    if (
        not isinstance(exponent, Number)
        or exponent.value.denominator != 1
        or abs(exponent.value) > 999
    ):
        return None
    return sign * exponent.value.numerator


def _close_decimals(first: Decimal, second: Decimal) -> bool:
    """Whether the longer one rounds, or is cut off, to the shorter one, or is it with the noise of a float."""
    short, long = sorted((first, second), key=lambda one: one.places)
    noise = _FLOAT_NOISE * abs(short.value)
    if (
        long.digits >= _FLOAT_DIGITS
        and short.digits <= _SHORT_DIGITS
        and abs(short.value - long.value) <= noise
    ):
        return True
    return _is_precise(short) and _rounds_to(long.value, short)


def _stands_for(rounded: Decimal, node: Node) -> bool:
    """Whether a decimal is an exact number rounded, or cut off, to at least six places."""
    if not _is_precise(rounded) or rounded.places > _MAX_PLACES or free_symbols(node):
        return False
    try:
        value = _as_fraction(number(node))
    except AnswerError:
        return False
    from_integer = abs(value - round(value))
    return (
        _rounds_to(value, rounded)
        and abs(value - rounded.value) * _FAR_FROM_INTEGER <= from_integer
    )


def _rounds_to(value: Fraction, rounded: Decimal) -> bool:
    """Whether a number rounds to a decimal, or does when it is cut off."""
    scale = Fraction(10) ** rounded.places
    return rounded.value * scale in (round(value * scale), trunc(value * scale))


def _is_precise(rounded: Decimal) -> bool:
    return rounded.places >= _MIN_PLACES and rounded.digits >= _MIN_DIGITS


def _as_fraction(value: Value) -> Fraction:
    if isinstance(value, Fraction):
        return value
    return Fraction(*map(int, libmp.to_rational(value._mpf_)))
