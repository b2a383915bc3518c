"""Are two expressions equal, as functions of their variables?

They are when they are equal at points chosen at random once and for all (a polynomial that is zero
at random points is zero, by Schwartz and Zippel); at each the two numbers are compared exactly.
Each variable is the same letter, in the same case, with the same subscripts and primes, in both.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache

from mpmath import mp

from spiral_mega.rewards.symbolic import calculus
from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.evaluate import Evaluator, Point, UndefinedError, Value
from spiral_mega.rewards.symbolic.nodes import (
    ZERO,
    Apply,
    Node,
    Number,
    free_symbols,
    functions,
    has_imaginary_unit,
    is_calculus,
    substitute,
)
from spiral_mega.rewards.symbolic.separation import equal_at

_STEPS = frozenset({"floor", "ceil", "mod", "gcd", "lcm", "factorial2", "sum", "prod"})
_ROUNDING = frozenset({"floor", "ceil"})
_ENOUGH = 3
_PLENTY = 5
_DENOMINATOR = 97
_LARGEST_INTEGER = 13
_SCALES = (
    Fraction(1),
    Fraction(1, 4),
    Fraction(3),
    Fraction(-1),
    Fraction(1, 2),
    Fraction(7),
    Fraction(1),
    Fraction(-4),
)
_BITS = 192


def equal(gold: Node, given: Node) -> bool:
    """Whether two expressions are equal. What cannot be decided counts as different.

    With variables, `gold` must not be a constant in disguise (x/x): anything of the kind would be
    equal to it.
    """
    try:
        names = free_symbols(gold)
        if gold == given or names != free_symbols(given):
            return gold == given
        if not names:
            return _equal_numbers(gold, given)
        return _equal_functions(gold, given, names) and not is_constant(gold)
    except (AnswerError, RecursionError):
        return False


def proportional(gold: Node, given: Node, positive: bool) -> bool:
    """Whether gold = c given for a constant c other than zero; with `positive`, for one above zero.

    An expression that is constant, such as the difference of the sides of N = N, is proportional to
    none.
    """
    names = free_symbols(gold)
    if not names or names != free_symbols(given):
        return False
    try:
        scale = _ratio_at_a_point(gold, given, names)
        if scale is None or (positive and sign(scale) <= 0):
            return False
        return equal(gold, Apply("mul", (scale, given)))
    except (AnswerError, RecursionError):
        return False


def is_constant(node: Node) -> bool:
    """Whether an expression has the same value wherever it has one, as x/x and N - N have."""
    values = [here for here in _at_points(node) if _is_defined(here)]
    return len(values) > 1 and all(
        equal_at(values[0], value, {}, real=False) for value in values[1:]
    )


def sign(node: Node) -> int:
    """The sign of a real number: -1, 0 or 1. Raises AnswerError if it has none."""
    if equal_at(node, ZERO, {}, real=True):
        return 0
    return 1 if number(node) > 0 else -1


def number(node: Node) -> Value:
    """The real number that an expression without variables is, to about 50 digits. Raises AnswerError if it is none."""
    with mp.workprec(_BITS):
        return Evaluator({}, real=True).value(node)


def _equal_numbers(gold: Node, given: Node) -> bool:
    if is_calculus(gold) or is_calculus(given):
        if not calculus.may_equal(gold, given):
            return False
        gold, given = calculus.exact(gold), calculus.exact(given)
        if gold == given:
            return True
    try:
        return equal_at(gold, given, {}, real=True)
    except UndefinedError:
        return equal_at(gold, given, {}, real=False)


def _equal_functions(gold: Node, given: Node, names: frozenset[str]) -> bool:
    """Equal at real points; at integers if they step, or have no values between; among the complex numbers with i."""
    if (functions(gold) | functions(given)) & _STEPS:
        at_integers = (
            _equal_at_points(gold, given, _step_points(names), real=True, plenty=48) is True
        )
        return (
            at_integers
            and not _rounds_integers_only(gold, names)
            and not _rounds_integers_only(given, names)
        )
    if has_imaginary_unit(gold) or has_imaginary_unit(given):
        return (
            _equal_at_points(gold, given, _real_points(names), real=False, plenty=_PLENTY) is True
        )
    for points in (_real_points(names), _integer_points(names)):
        decided = _equal_at_points(gold, given, points, real=True, plenty=_PLENTY)
        if decided is not None:
            return decided
    return _equal_at_points(gold, given, _real_points(names), real=False, plenty=_PLENTY) is True


def _rounds_integers_only(node: Node, names: frozenset[str]) -> bool:
    """Whether rounding in an expression changes nothing at integers, as in floor(x), which is not x."""
    if not functions(node) & _ROUNDING:
        return False
    return (
        _equal_at_points(node, _without_rounding(node), _step_points(names), real=True, plenty=48)
        is True
    )


def _without_rounding(node: Node) -> Node:
    if not isinstance(node, Apply):
        return node
    arguments = tuple(map(_without_rounding, node.arguments))
    return arguments[0] if node.function in _ROUNDING else Apply(node.function, arguments)


def _equal_at_points(
    gold: Node, given: Node, points: Iterable[Point], real: bool, plenty: int
) -> bool | None:
    """Whether they are equal at `plenty` points where both have values, or at all; None if these
    are too few.

    `given` may lack values where `gold` has them (2 ln x and ln x^2), but not at more than half of
    these points.
    """
    agreed = missing = 0
    for point in points:
        try:
            if not equal_at(gold, given, point, real):
                return False
            agreed += 1
        except UndefinedError:
            missing += _is_defined(gold, point, real)
    if agreed < _ENOUGH:
        return None
    return agreed >= missing


def _is_defined(node: Node, point: Point | None = None, real: bool = False) -> bool:
    try:
        with mp.workprec(_BITS):
            Evaluator(point or {}, real).value(node)
    except UndefinedError:
        return False
    return True


def _ratio_at_a_point(gold: Node, given: Node, names: frozenset[str]) -> Node | None:
    """The expression gold/given with numbers for its variables, at the first point where neither is zero."""
    points = _step_points(names) if functions(gold) & _STEPS else _real_points(names)
    for point in points:
        here, there = _at(gold, point), _at(given, point)
        if _is_defined(here) and _is_defined(there) and not _is_zero(here) and not _is_zero(there):
            return Apply("div", (here, there))
    return None


def _is_zero(node: Node) -> bool:
    return equal_at(node, ZERO, {}, real=False)


def _at_points(node: Node) -> list[Node]:
    """The expression with numbers for its variables, at some points."""
    names = free_symbols(node)
    if functions(node) & _STEPS:
        return [_at(node, point) for point in _step_points(names)]
    return [_at(node, point) for point in (*_real_points(names)[:4], *_integer_points(names)[:4])]


def _at(node: Node, point: Point) -> Node:
    return substitute(node, {name: Number(value) for name, value in point.items()})


@lru_cache(maxsize=256)
def _real_points(names: frozenset[str]) -> tuple[Point, ...]:
    """Four points between 0 and 1, two with larger coordinates, and two with negative ones."""
    return tuple(_real_point(names, index, scale) for index, scale in enumerate(_SCALES))


@lru_cache(maxsize=256)
def _integer_points(names: frozenset[str], count: int = 16) -> tuple[Point, ...]:
    return tuple(_integer_point(names, index) for index in range(count))


def _step_points(names: frozenset[str]) -> tuple[Point, ...]:
    """Integers only: 1 to 40 for one variable, so that every remainder of a small divisor occurs."""
    if len(names) == 1:
        (name,) = names
        return tuple({name: Fraction(value)} for value in range(1, 41))
    return _integer_points(names, 48)


def _real_point(names: frozenset[str], index: int, scale: Fraction) -> Point:
    return {
        name: scale * Fraction(1 + _hash(name, index) % (_DENOMINATOR - 2), _DENOMINATOR)
        for name in names
    }


def _integer_point(names: frozenset[str], index: int) -> Point:
    return {name: Fraction(1 + _hash(name, index) % _LARGEST_INTEGER) for name in names}


def _hash(name: str, index: int) -> int:
    return zlib.crc32(f"{name} at point {index}".encode())
