"""The value of an expression at a point: an exact fraction where arithmetic gives one, else a
number of mpmath.

The precision is mpmath's working precision (`mp.workprec`), which the caller sets. Sizes are
bounded before anything is computed: what would take more than MAX_BITS bits raises AnswerError.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import comb, gcd, lcm, prod
from typing import Any

from mpmath import mp, mpc, mpf

from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.nodes import UNKNOWN_FUNCTION, Apply, Node, Number, Symbol

MAX_BITS = 1 << 18
_MAX_FACTORIAL = 5_000
_MAX_TERMS = 2_000
_ODD_ROOTS = frozenset(
    {3, 5, 7, 9, 11, 13, 15}
)  # larger denominators are values of variables, as in (-1)^n
_MAX_EXPONENT_BITS = 17  # of an argument of exp: the result has 2^17 bits before the point

Float = Any  # a real (mpf) or complex (mpc) number of mpmath, which has no types
Value = Fraction | Float
Point = Mapping[str, Fraction]


class UndefinedError(AnswerError):
    """The expression has no value at the point: a division by zero, or a root of a negative number among the reals."""


class Evaluator:
    """Evaluate expressions at `point`, over the reals (where \\sqrt{-1} is undefined) or over the complex numbers."""

    def __init__(self, point: Point, real: bool) -> None:
        self._point = point
        self._real = real

    def value(self, node: Node) -> Value:
        """The value of a node. Raises UndefinedError where there is none, AnswerError for one that is too large."""
        if isinstance(node, Number):
            return node.value
        if isinstance(node, Symbol):
            return self._symbol(node.name)
        if node.function in ("sum", "prod"):
            return self._finite_sum(node)
        arguments = [self.value(argument) for argument in node.arguments]
        try:
            result = self._apply(node.function, arguments)
        except (ZeroDivisionError, ValueError, OverflowError) as error:
            raise UndefinedError(f"{node.function} is undefined here: {error}") from error
        return self._checked(result)

    def _symbol(self, name: str) -> Value:
        if name in self._point:
            return self._point[name]
        if name == "pi":
            return +mp.pi
        if name == "e":
            return +mp.e
        if name == "i" and not self._real:
            return mpc(0, 1)
        raise UndefinedError(f"{name} has no value")

    def _apply(self, function: str, arguments: list[Value]) -> Value:
        if function.startswith(UNKNOWN_FUNCTION):
            return _unknown_function(function, arguments)
        if function in ("pow", "root"):
            return self._power(function, arguments)
        if function in _EXACT and all(isinstance(argument, Fraction) for argument in arguments):
            return _EXACT[function](*arguments)
        if function in _ON_REALS and any(isinstance(argument, mpc) for argument in arguments):
            raise UndefinedError(f"{function} of a complex number")
        if function not in _NUMERIC:
            raise AnswerError(f"{function} is not evaluated")
        return _NUMERIC[function](*map(numeric, arguments))

    def _power(self, function: str, arguments: list[Value]) -> Value:
        if function == "root":
            base, exponent = arguments[0], 1 / _fraction(arguments[1])
        else:
            base, exponent = arguments
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            return _integer_power(base, exponent.numerator)
        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            exact = _exact_root(base, exponent)
            if exact is not None:
                return exact
        if self._real and not isinstance(base, mpc) and base <= 0:
            return self._real_power_of_negative(base, exponent)
        _check_exponent(base, exponent)
        return mp.power(numeric(base), numeric(exponent))

    def _real_power_of_negative(self, base: Value, exponent: Value) -> Value:
        """Odd roots of negative numbers are real: the cube root of -8 is -2."""
        if base == 0 and exponent > 0:
            return Fraction(0)
        if (
            base == 0
            or not isinstance(exponent, Fraction)
            or exponent.denominator not in _ODD_ROOTS
        ):
            raise UndefinedError("a power of a negative number")
        size = mp.power(numeric(-base), numeric(exponent))
        return -size if exponent.numerator % 2 else size

    def _finite_sum(self, node: Apply) -> Value:
        body, variable, low, high = node.arguments
        first, last = _integer(self.value(low)), _integer(self.value(high))
        if last - first > _MAX_TERMS:
            raise AnswerError(f"a {node.function} of more than {_MAX_TERMS} terms")
        assert isinstance(variable, Symbol)
        terms = []
        for index in range(first, last + 1):
            point = {**self._point, variable.name: Fraction(index)}
            terms.append(Evaluator(point, self._real).value(body))
        return self._checked(_NUMERIC_OR_EXACT[node.function](terms))

    def _checked(self, value: Value) -> Value:
        """The value, if it is finite, and real where it has to be. Drops an imaginary part that is zero."""
        if isinstance(value, Fraction):
            if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
                raise AnswerError("a number of too many digits")
            return value
        if not mp.isfinite(value):
            raise UndefinedError("an infinite value")
        if isinstance(value, mpc) and self._real:
            raise UndefinedError("a value that is not real")
        return value


def to_mpf(value: Fraction) -> Float:
    """A fraction to the working precision."""
    return mpf(value.numerator) / value.denominator


def numeric(value: Value) -> Float:
    """A value as a number of mpmath, to the working precision."""
    return to_mpf(value) if isinstance(value, Fraction) else value


def _fraction(value: Value) -> Fraction:
    if not isinstance(value, Fraction):
        raise UndefinedError("not a rational number")
    return value


def _integer(value: Value) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1:
        raise UndefinedError("not an integer")
    return value.numerator


def _integer_power(base: Value, exponent: int) -> Value:
    if isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits > 1 and bits * abs(exponent) > MAX_BITS:
            raise AnswerError("a power of too many digits")
        return base**exponent
    if base != 0:
        _check_exponent(base, Fraction(exponent))
    return mp.power(base, exponent)


def _exact_root(base: Fraction, exponent: Fraction) -> Fraction | None:
    """base^exponent if it is rational and small enough to tell at once."""
    degree = exponent.denominator
    if (
        base <= 0
        or degree > 64
        or max(base.numerator.bit_length(), base.denominator.bit_length()) > 2_000
    ):
        return None
    top, bottom = _integer_root(base.numerator, degree), _integer_root(base.denominator, degree)
    if top is None or bottom is None:
        return None
    power = _integer_power(Fraction(top, bottom), exponent.numerator)
    return power if isinstance(power, Fraction) else None


def _integer_root(number: int, degree: int) -> int | None:
    """The root of a perfect power; None of another number. Newton's method in integers."""
    if number < 2:
        return number
    guess = 1 << -(-number.bit_length() // degree)
    while True:
        better = ((degree - 1) * guess + number // guess ** (degree - 1)) // degree
        if better >= guess:
            return guess if guess**degree == number else None
        guess = better


def _check_exponent(base: Value, exponent: Value) -> None:
    """Raise AnswerError if base^exponent has more bits before or after the point than are worth computing."""
    if abs(numeric(exponent) * mp.log(abs(numeric(base)))) > 2**_MAX_EXPONENT_BITS:
        raise AnswerError("an exponent that is too large")


def _bounded(function: Callable[..., Value]) -> Callable[..., Value]:
    """A function that takes ever more work for larger arguments, for those that are small enough."""

    def checked(argument: Value) -> Value:
        if abs(argument) > 2**_MAX_EXPONENT_BITS:
            raise AnswerError("an argument that is too large")
        return function(argument)

    return checked


def _factorial(argument: Value) -> Value:
    if isinstance(argument, mpc) or abs(argument) > _MAX_FACTORIAL:
        raise AnswerError("a factorial that is too large")
    if isinstance(argument, Fraction) and argument.denominator == 1:
        if argument < 0:
            raise UndefinedError("the factorial of a negative integer")
        return Fraction(prod(range(2, argument.numerator + 1)))
    return mp.factorial(numeric(argument))


def _double_factorial(argument: Fraction) -> Fraction:
    number = _integer(argument)
    if not 0 <= number <= _MAX_FACTORIAL:
        raise UndefinedError("a double factorial out of range")
    return Fraction(prod(range(number, 1, -2)))


def _binomial(top: Value, bottom: Value) -> Value:
    if isinstance(top, mpc) or isinstance(bottom, mpc):
        raise UndefinedError("a binomial of complex numbers")
    if (
        isinstance(top, Fraction)
        and isinstance(bottom, Fraction)
        and top.denominator == bottom.denominator == 1
    ):
        if not 0 <= top <= 20_000:
            raise UndefinedError("a binomial out of range")
        return Fraction(comb(top.numerator, bottom.numerator)) if bottom >= 0 else Fraction(0)
    if abs(top) > _MAX_FACTORIAL or abs(bottom) > _MAX_FACTORIAL:
        raise AnswerError("a binomial that is too large")
    return mp.binomial(numeric(top), numeric(bottom))


def _remainder(value: Fraction, modulus: Fraction) -> Fraction:
    return value % modulus


def _in_base(digits: Fraction, base: Fraction) -> Fraction:
    """The number whose digits in `base` are those of `digits` in base ten."""
    if _integer(base) > 10:
        raise UndefinedError("a base beyond ten")
    return Fraction(int(str(_integer(digits)), _integer(base)))


def _unknown_function(name: str, arguments: list[Value]) -> Value:
    """A value for f(x) of an unknown f: that of some smooth function, which depends on the name alone."""
    seed = zlib.crc32(name.encode())
    total = mpf(seed % 89 + 3) / 97
    for index, argument in enumerate(arguments):
        total = total + numeric(argument) * (mpf(seed % (101 + index) + 7) / 53)
    if abs(total) > 2**_MAX_EXPONENT_BITS:
        raise AnswerError("an argument that is too large")
    return mp.sin(total) + 2


def _maximum(*values: Value) -> Value:
    return max(values)


def _minimum(*values: Value) -> Value:
    return min(values)


def _total(values: list[Value]) -> Value:
    exact = sum((value for value in values if isinstance(value, Fraction)), Fraction(0))
    others = [value for value in values if not isinstance(value, Fraction)]
    return mp.fsum([to_mpf(exact), *others]) if others else exact


def _product(values: list[Value]) -> Value:
    result: Value = Fraction(1)
    for value in values:
        exact = isinstance(result, Fraction) and isinstance(value, Fraction)
        result = result * value if exact else numeric(result) * numeric(value)
        if (
            isinstance(result, Fraction)
            and result.numerator.bit_length() + result.denominator.bit_length() > MAX_BITS
        ):
            raise AnswerError("a number of too many digits")
    return result


_NUMERIC_OR_EXACT: dict[str, Callable[[list[Value]], Value]] = {"sum": _total, "prod": _product}
_EXACT: dict[str, Callable[..., Value]] = {
    "add": lambda *values: sum(values, Fraction(0)),
    "mul": lambda left, right: left * right,
    "neg": lambda value: -value,
    "div": lambda top, bottom: top / bottom,
    "mod": _remainder,
    "abs": abs,
    "floor": lambda value: Fraction(value.numerator // value.denominator),
    "ceil": lambda value: -Fraction(-value.numerator // value.denominator),
    "max": _maximum,
    "min": _minimum,
    "gcd": lambda *values: Fraction(gcd(*map(_integer, values))),
    "lcm": lambda *values: Fraction(lcm(*map(_integer, values))),
    "factorial": _factorial,
    "factorial2": _double_factorial,
    "binom": _binomial,
    "base": _in_base,
    "conj": lambda value: value,
    "Re": lambda value: value,
    "Im": lambda value: Fraction(0),
}
_NUMERIC: dict[str, Callable[..., Value]] = {
    "add": lambda *values: mp.fsum(values),
    "mul": lambda left, right: left * right,
    "neg": lambda value: -value,
    "div": lambda top, bottom: top / bottom,
    "abs": abs,
    "floor": mp.floor,
    "ceil": mp.ceil,
    "max": _maximum,
    "min": _minimum,
    "factorial": _factorial,
    "binom": _binomial,
    "conj": mp.conj,
    "Re": mp.re,
    "Im": mp.im,
    "arg": mp.arg,
    "deg": lambda value: value * mp.pi / 180,
    "minutes": lambda value: value * mp.pi / (180 * 60),
    "seconds": lambda value: value * mp.pi / (180 * 3600),
    "ln": mp.log,
    "log": lambda value, base: mp.log(value) / mp.log(base),
    "arcsin": mp.asin,
    "arccos": mp.acos,
    "arctan": mp.atan,
    "arccot": mp.acot,
    "arcsec": mp.asec,
    "arccsc": mp.acsc,
    **{
        name: _bounded(getattr(mp, name))
        for name in (
            "exp",
            "sin",
            "cos",
            "tan",
            "cot",
            "sec",
            "csc",
            "sinh",
            "cosh",
            "tanh",
            "coth",
        )
    },
}
_ON_REALS = frozenset({"floor", "ceil", "max", "min"})
