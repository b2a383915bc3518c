"""Equations that name their value, and what they state: x = 5, f(x) = 2x, AB = BC = 5, \\sqrt2 \\approx 1.414."""

from __future__ import annotations

from fractions import Fraction

from spiral_mega.rewards.symbolic.answers import Answer, Relation, Sequence, Text, Value
from spiral_mega.rewards.symbolic.decimals import decimal
from spiral_mega.rewards.symbolic.equality import sign
from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.nodes import (
    CONSTANTS,
    UNKNOWN_FUNCTION,
    Apply,
    Node,
    Number,
    Symbol,
    free_symbols,
    subtract,
)
from spiral_mega.rewards.symbolic.quantities import same_quantity

_SIGNS = frozenset({"=", "approx", "equiv"})


def is_equation(answer: Answer) -> bool:
    """Whether an answer is a chain of equations, exact or approximate."""
    return isinstance(answer, Relation) and _SIGNS.issuperset(answer.signs)


def is_name(answer: Answer) -> bool:
    """Whether one side of an equation is a name: a variable, f(x), AB, |AB|, words, or a tuple of names."""
    if isinstance(answer, Sequence):
        return answer.opening == "(" and all(map(is_name, answer.items))
    return isinstance(answer, Text) or (
        isinstance(answer, Value) and answer.unit is None and _names(answer.node)
    )


def name_of(equation: Relation) -> Answer | None:
    """The name that an equation gives to its value; None if neither of its ends is one."""
    for side in (equation.sides[0], equation.sides[-1]):
        if is_name(side):
            return side
    return None


def stated(equation: Relation) -> tuple[Answer, ...]:
    """What an equation states as its value: the side that is no name, and the exact side before an
    approximate one.

    Nothing, if two of its sides are different numbers: 4 = 5 states neither.
    """
    sides, signs = equation.sides, equation.signs
    if not _is_consistent(equation):
        return ()
    if is_name(sides[-1]) and not is_name(sides[0]):
        return (sides[0],)
    if signs[-1] == "approx" and _is_number(sides[-2]):
        return (sides[-1], sides[-2])
    return (sides[-1],)


def _names(node: Node) -> bool:
    if isinstance(node, Symbol):
        return node.name not in CONSTANTS or node.name == "e"
    if not isinstance(node, Apply):
        return False
    if node.function.startswith(UNKNOWN_FUNCTION):
        return True
    return node.function in ("mul", "abs") and all(map(_is_capital, node.arguments))


def _is_capital(node: Node) -> bool:
    """Whether a node is a point, or a product of points as in AB."""
    if isinstance(node, Symbol):
        return node.name[:1].isupper() or node.name.startswith("vec ")
    return (
        isinstance(node, Apply) and node.function == "mul" and all(map(_is_capital, node.arguments))
    )


def _is_number(answer: Answer) -> bool:
    return isinstance(answer, Value) and not free_symbols(answer.node)


def _is_consistent(equation: Relation) -> bool:
    """Whether all sides that are numbers are the same one; a decimal to the places that it has."""
    numbers = [
        side for side in equation.sides if isinstance(side, Value) and not free_symbols(side.node)
    ]
    rounded = "approx" in equation.signs
    for other in numbers[1:]:
        if not same_quantity(numbers[0], other) and not (
            rounded and _is_near(numbers[0].node, other.node)
        ):
            return False
    return True


def _is_near(first: Node, second: Node) -> bool:
    decimals = [found for found in (decimal(first), decimal(second)) if found is not None]
    if not decimals:
        return False
    tolerance = Number(Fraction(1, 10) ** min(found.places for found in decimals))
    try:
        return sign(subtract(Apply("abs", (subtract(first, second),)), tolerance)) <= 0
    except AnswerError:
        return False
