"""Are two numbers equal? Decided with as many digits as their expressions can need to differ, not
by rounding.

An expression E of integers, + - * / and roots is U/L of two algebraic integers, and unless it is
zero

    |E| >= 1 / (u^(D-1) l)

where u and l bound U, L and their conjugates, and D is the product of the degrees of the roots
(Burnikel, Funke, Mehlhorn, Schirra, Schmitt 2001). So 1 - 2^-99 and 1 - 2^-98 are told apart, and
\\sqrt2 + \\sqrt3 equals \\sqrt{5 + 2\\sqrt6}: their difference is below its bound. For other
functions no such bound is known; each is given the bits of its argument and 16 more, which by
experience (the uniformity conjecture) is more than enough.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from mpmath import mp

from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.evaluate import Evaluator, Point, Value, numeric
from spiral_mega.rewards.symbolic.nodes import Apply, Node

_FIRST_BITS = 192
_MARGIN_BITS = 64
_FUNCTION_BITS = 16.0
_MAX_SIZE_BITS = float(1 << 17)
_MAX_DEGREE_BITS = 20_000.0
_MAX_DEGREE = 64
_MAX_ROOT = 16


def equal_at(left: Node, right: Node, point: Point, real: bool) -> bool:
    """Whether two expressions have the same value at a point.

    Raises UndefinedError where one has no value, AnswerError when they are too large to compare.
    """
    with mp.workprec(_FIRST_BITS):
        evaluator = _Recorder(point, real)
        first, second = evaluator.value(left), evaluator.value(right)
        if isinstance(first, Fraction) and isinstance(second, Fraction):
            return first == second
        first, second = numeric(first), numeric(second)
        if abs(first - second) > mp.ldexp(abs(first) + abs(second), -_FIRST_BITS // 4):
            return False
    bits = _separation_bits(evaluator, left, right)
    with mp.workprec(2 * bits + 2 * _MARGIN_BITS):
        exact = Evaluator(point, real)
        difference = abs(numeric(exact.value(left)) - numeric(exact.value(right)))
        return bool(difference < mp.ldexp(1, -bits - _MARGIN_BITS // 2))


class _Recorder(Evaluator):
    """An evaluator that keeps the value of every node, by identity."""

    def __init__(self, point: Point, real: bool) -> None:
        super().__init__(point, real)
        self.values: dict[int, Value] = {}

    def value(self, node: Node) -> Value:
        value = self.values[id(node)] = super().value(node)
        return value


class _Size(NamedTuple):
    """log2 of u and of l, both at least 0, and whether the expression is built of integers, + - * / and roots."""

    upper: float
    lower: float
    algebraic: bool = True


def _separation_bits(evaluator: _Recorder, left: Node, right: Node) -> int:
    """Bits after the point to which left - right has to be computed to tell it from zero."""
    roots: dict[Node, int] = {}
    size = _sum([_size(node, evaluator, roots) for node in (left, right)])
    if size.upper + size.lower > _MAX_SIZE_BITS:
        raise AnswerError("numbers that are too large to compare")
    degree = min(math.prod(roots.values()), _MAX_DEGREE)
    return math.ceil(min((degree - 1) * size.upper, _MAX_DEGREE_BITS) + size.upper + size.lower)


def _size(node: Node, evaluator: _Recorder, roots: dict[Node, int]) -> _Size:
    """The size of an expression; adds its irrational roots, with their degrees, to `roots`."""
    value = evaluator.values.get(id(node))
    if isinstance(value, Fraction):
        return _Size(_log2(value.numerator), _log2(value.denominator))
    if not isinstance(node, Apply) or value is None:
        return _Size(_FUNCTION_BITS, _FUNCTION_BITS, algebraic=False)
    sizes = [_size(argument, evaluator, roots) for argument in node.arguments]
    if node.function == "add":
        return _sum(sizes)
    if node.function in ("neg", "abs", "conj"):
        return sizes[0]
    if node.function == "mul":
        return _product(sizes[0], sizes[1])
    if node.function == "div":
        return _product(sizes[0], _inverse(sizes[1]))
    exponent = _exponent(node, evaluator)
    if exponent is not None and sizes[0].algebraic:
        return _power(node, sizes[0], exponent, roots)
    return _function(value, sizes)


def _exponent(node: Apply, evaluator: _Recorder) -> Fraction | None:
    """The exponent of a power or root, if it is a fraction with a small denominator."""
    if node.function not in ("pow", "root"):
        return None
    exponent = evaluator.values[id(node.arguments[1])]
    if not isinstance(exponent, Fraction) or exponent == 0:
        return None
    exponent = exponent if node.function == "pow" else 1 / exponent
    return exponent if exponent.denominator <= _MAX_ROOT else None


def _power(node: Node, base: _Size, exponent: Fraction, roots: dict[Node, int]) -> _Size:
    upper, lower, _ = base if exponent > 0 else _inverse(base)
    power, degree = abs(exponent.numerator), exponent.denominator
    upper, lower = upper * power, lower * power
    if degree == 1:
        return _Size(upper, lower)
    roots[node] = degree
    if upper >= lower:
        return _Size((upper + (degree - 1) * lower) / degree, lower)
    return _Size(upper, ((degree - 1) * upper + lower) / degree)


def _function(value: Value, sizes: list[_Size]) -> _Size:
    bits = sum(size.upper + size.lower for size in sizes) + _FUNCTION_BITS
    magnitude = abs(float(mp.log(abs(value), 2))) if value != 0 else 0.0
    return _Size(bits + magnitude, bits + magnitude, algebraic=False)


def _sum(sizes: list[_Size]) -> _Size:
    total = sizes[0]
    for size in sizes[1:]:
        upper = max(total.upper + size.lower, size.upper + total.lower) + 1
        total = _Size(upper, total.lower + size.lower, total.algebraic and size.algebraic)
    return total


def _product(first: _Size, second: _Size) -> _Size:
    return _Size(
        first.upper + second.upper, first.lower + second.lower, first.algebraic and second.algebraic
    )


def _inverse(size: _Size) -> _Size:
    return _Size(size.lower, size.upper, size.algebraic)


def _log2(number: int) -> float:
    """log2 of an integer, or a little more."""
    return float(abs(number).bit_length()) if abs(number) > 1 else 0.0
