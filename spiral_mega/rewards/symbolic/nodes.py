"""Expressions as small trees: numbers, symbols, and functions applied to expressions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

CONSTANTS = frozenset({"pi", "e", "i", "infty"})
UNKNOWN_FUNCTION = "f:"
BINDERS = frozenset({"sum", "prod", "int", "lim"})


@dataclass(frozen=True, slots=True)
class Number:
    """A literal number, exact. `places` counts the decimal places as written; None without a decimal point."""

    value: Fraction
    places: int | None = None


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable or one of CONSTANTS. Names are as written, with their subscripts, primes and accents."""

    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    """A function of `arguments`.

    Arithmetic: add, mul, neg, div, pow, root (radicand, degree), pm (a plus-minus sign before its
    argument), mp. Binders (BINDERS) have the bound variable second: sum, prod and int are (body,
    variable, low, high), lim is (body, variable, point). An unknown function's name begins with
    UNKNOWN_FUNCTION.
    """

    function: str
    arguments: tuple[Node, ...]


Node = Number | Symbol | Apply

INFINITY = Symbol("infty")
NEGATIVE_INFINITY = Apply("neg", (INFINITY,))
ZERO = Number(Fraction(0))
ONE = Number(Fraction(1))
HALF_TURN = Number(Fraction(180))
PI = Symbol("pi")


def integer(value: int) -> Number:
    """The node of an integer."""
    return Number(Fraction(value))


def subtract(left: Node, right: Node) -> Apply:
    """The node left - right."""
    return Apply("add", (left, Apply("neg", (right,))))


def radians(degrees: Node) -> Apply:
    """The node of an angle in radians."""
    return Apply("div", (Apply("mul", (degrees, PI)), HALF_TURN))


def is_deeper_than(node: Node, limit: int) -> bool:
    """Whether an expression is nested deeper than a limit. Not recursive, as most functions of expressions are."""
    level = [node]
    for _ in range(limit):
        level = [inner for outer in level if isinstance(outer, Apply) for inner in outer.arguments]
        if not level:
            return False
    return True


@lru_cache(maxsize=4096)
def free_symbols(node: Node) -> frozenset[str]:
    """Names of the variables and unknown functions of an expression; bound variables and constants are not free."""
    if isinstance(node, Number):
        return frozenset()
    if isinstance(node, Symbol):
        return frozenset({node.name}) - CONSTANTS
    names = frozenset[str]().union(*map(free_symbols, node.arguments))
    if node.function in BINDERS:
        names -= {_bound_name(node)}
    if node.function.startswith(UNKNOWN_FUNCTION):
        names |= {node.function}
    return names


@lru_cache(maxsize=4096)
def functions(node: Node) -> frozenset[str]:
    """Names of all functions that an expression applies."""
    if not isinstance(node, Apply):
        return frozenset()
    return frozenset({node.function}).union(*map(functions, node.arguments))


@lru_cache(maxsize=4096)
def has_imaginary_unit(node: Node) -> bool:
    """Whether i occurs in an expression other than as a bound variable."""
    if isinstance(node, Apply):
        bound = node.function in BINDERS and _bound_name(node) == "i"
        return not bound and any(map(has_imaginary_unit, node.arguments))
    return node == Symbol("i")


@lru_cache(maxsize=4096)
def is_calculus(node: Node) -> bool:
    """Whether an expression has a limit, an integral, or a sum or product without end."""
    if not isinstance(node, Apply):
        return False
    if node.function in ("lim", "int") or (
        node.function in BINDERS and node.arguments[3] == INFINITY
    ):
        return True
    return any(map(is_calculus, node.arguments))


def substitute(node: Node, values: Mapping[str, Node]) -> Node:
    """Replace symbols by expressions, except where they are bound."""
    if isinstance(node, Symbol):
        return values.get(node.name, node)
    if isinstance(node, Number):
        return node
    if node.function in BINDERS:
        values = {name: value for name, value in values.items() if name != _bound_name(node)}
    return Apply(node.function, tuple(substitute(argument, values) for argument in node.arguments))


def _bound_name(node: Apply) -> str:
    variable = node.arguments[1]
    return variable.name if isinstance(variable, Symbol) else ""
