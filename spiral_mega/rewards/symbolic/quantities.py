"""Numbers and expressions with units: 5 cm is 0.05 m, 25 % is 25 or 1/4, 45° is pi/4."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from spiral_mega.rewards.symbolic.answers import Value
from spiral_mega.rewards.symbolic.decimals import equal_numbers
from spiral_mega.rewards.symbolic.equality import equal
from spiral_mega.rewards.symbolic.nodes import (
    Apply,
    Node,
    Number,
    Symbol,
    free_symbols,
    functions,
    radians,
)
from spiral_mega.rewards.symbolic.unit_table import DEGREE, PERCENT, Unit, find_unit

_HUNDRED = Number(Fraction(100))
_PI = Symbol("pi")
_ANGLES = frozenset({"deg", "arcsin", "arccos", "arctan", "arccot"})


def same_quantity(gold: Value, given: Value) -> bool:
    """Whether two values are the same. A unit that only one side has, or that is no known one, is left out."""
    if PERCENT in (gold.unit, given.unit):
        return _same_percentage(gold, given)
    if gold.unit is not None and given.unit is not None and gold.unit.powers and given.unit.powers:
        return _same_measure(gold.node, gold.unit, given.node, given.unit)
    if _same(gold.node, given.node):
        return True
    return (
        _same_angle(gold, given)
        or _same_with_letters(gold, given)
        or _same_with_letters(given, gold)
    )


def _same(gold: Node, given: Node) -> bool:
    if free_symbols(gold) or free_symbols(given):
        return equal(gold, given)
    return equal_numbers(gold, given)


def _same_percentage(gold: Value, given: Value) -> bool:
    """62.5 % is 62.5 and 0.625."""
    if gold.unit == given.unit:
        return _same(gold.node, given.node)
    percentage, other, swapped = (
        (gold, given, False) if gold.unit == PERCENT else (given, gold, True)
    )
    if other.unit is not None and other.unit.powers:
        return False
    for node in (percentage.node, Apply("div", (percentage.node, _HUNDRED))):
        if _same(other.node, node) if swapped else _same(node, other.node):
            return True
    return False


def _same_measure(gold: Node, gold_unit: Unit, given: Node, given_unit: Unit) -> bool:
    if gold_unit.powers != given_unit.powers:
        return False
    if gold_unit.size == given_unit.size:
        return _same(gold, given)
    scale = Number(given_unit.size / gold_unit.size)
    return _same(gold, Apply("mul", (scale, given)))


def _same_angle(gold: Value, given: Value) -> bool:
    """An angle in degrees is the same as one in radians that is written with pi, or with degrees inside."""
    for degrees, other in ((gold, given), (given, gold)):
        if degrees.unit == DEGREE and other.unit is None and _is_in_radians(other.node):
            return equal(radians(degrees.node), other.node)
    return False


def _is_in_radians(node: Node) -> bool:
    return bool(functions(node) & _ANGLES) or _mentions_pi(node)


def _mentions_pi(node: Node) -> bool:
    return node == _PI or (isinstance(node, Apply) and any(map(_mentions_pi, node.arguments)))


def _same_with_letters(measured: Value, bare: Value) -> bool:
    """5 \\text{ m} is 5m, where m was read as a variable."""
    if measured.unit is None or not measured.unit.powers or bare.unit is not None:
        return False
    product = bare.node
    if (
        not isinstance(product, Apply)
        or product.function != "mul"
        or not isinstance(product.arguments[1], Symbol)
    ):
        return False
    unit = find_unit(product.arguments[1].name)
    return unit is not None and _same_measure(
        measured.node, measured.unit, product.arguments[0], unit
    )


def variants(node: Node) -> Iterator[Node]:
    """The two expressions that one with plus-minus signs stands for; the expression itself without any."""
    if functions(node) & {"pm", "mp"}:
        yield _with_signs(node, plus=True)
        yield _with_signs(node, plus=False)
    else:
        yield node


def _with_signs(node: Node, plus: bool) -> Node:
    if not isinstance(node, Apply):
        return node
    arguments = tuple(_with_signs(argument, plus) for argument in node.arguments)
    if node.function in ("pm", "mp"):
        return arguments[0] if (node.function == "pm") == plus else Apply("neg", arguments)
    return Apply(node.function, arguments)
