"""Limits, integrals and infinite sums without variables: a number for a first look, and sympy's exact value."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from mpmath import mp

from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.evaluate import Evaluator, Value, numeric
from spiral_mega.rewards.symbolic.nodes import (
    BINDERS,
    INFINITY,
    NEGATIVE_INFINITY,
    Apply,
    Node,
    Number,
    Symbol,
    is_calculus,
)
from spiral_mega.rewards.symbolic.vocabulary import vocabulary

_FIRST_LOOK_BITS = 80
_TOLERANCE = 1e-4
_STEP = mp.mpf(2) ** -24

_TO_SYMPY: dict[str, Callable[..., Any]] = {
    "add": sympy.Add,
    "mul": sympy.Mul,
    "neg": lambda value: -value,
    "div": lambda top, bottom: top / bottom,
    "pow": sympy.Pow,
    "root": lambda radicand, degree: sympy.Pow(radicand, 1 / degree),
    "log": sympy.log,
    "ln": sympy.log,
    "exp": sympy.exp,
    "abs": sympy.Abs,
    "factorial": sympy.factorial,
    "binom": sympy.binomial,
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    **{
        name: getattr(sympy, name)
        for name in sorted(vocabulary("sin cos tan cot sec csc sinh cosh tanh coth floor"))
    },
}
_FROM_SYMPY = {
    "log": "ln",
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "Abs": "abs",
    "binomial": "binom",
}
_SYMPY_CONSTANTS: dict[Node, Any] = {
    Symbol("pi"): sympy.pi,
    Symbol("e"): sympy.E,
    Symbol("i"): sympy.I,
    INFINITY: sympy.oo,
}
_CONSTANT_NODES: dict[Any, Node] = {value: node for node, value in _SYMPY_CONSTANTS.items()}


def may_equal(left: Node, right: Node) -> bool:
    """Whether two expressions without variables agree to a few digits. Raises AnswerError if one
    cannot be computed.

    Much cheaper than `exact`, so that a wrong answer does not cost an integration.
    """
    if INFINITY in (left, right) or NEGATIVE_INFINITY in (left, right):
        return True
    with mp.workprec(_FIRST_LOOK_BITS):
        first, second = _approximate(left), _approximate(right)
        return bool(abs(first - second) <= _TOLERANCE * (abs(first) + abs(second) + _TOLERANCE))


@lru_cache(maxsize=256)
def exact(node: Node) -> Node:
    """Replace limits, integrals and infinite sums by their values. Raises AnswerError for one without a closed form."""
    if not is_calculus(node) or not isinstance(node, Apply):
        return node
    if node.function not in BINDERS:
        return Apply(node.function, tuple(map(exact, node.arguments)))
    body, variable, *bounds = map(_to_sympy, node.arguments)
    if node.function == "int":
        return _from_sympy(sympy.integrate(body, (variable, *bounds)))
    if node.function == "lim":
        return _from_sympy(
            sympy.limit(body, variable, bounds[0], "+-" if bounds[0].is_finite else "+")
        )
    total = sympy.summation if node.function == "sum" else sympy.product
    return _from_sympy(sympy.simplify(total(body, (variable, *bounds))))


class _Approximator(Evaluator):
    """An evaluator that also takes limits, integrals and infinite sums, roughly."""

    def value(self, node: Node) -> Value:
        if not isinstance(node, Apply) or node.function not in BINDERS or not is_calculus(node):
            return super().value(node)
        body, variable, *bounds = node.arguments
        assert isinstance(variable, Symbol)

        def at(argument: Any) -> Value:
            return numeric(
                _Approximator({**self._point, variable.name: argument}, real=True).value(body)
            )

        if node.function == "lim":
            return at(
                1 / _STEP if bounds[0] == INFINITY else numeric(self.value(bounds[0])) + _STEP
            )
        ends = [self._end(bound) for bound in bounds]
        if node.function == "int":
            return mp.quad(at, ends)
        return mp.nsum(at, ends) if node.function == "sum" else mp.nprod(at, ends)

    def _end(self, bound: Node) -> Any:
        if bound in (INFINITY, NEGATIVE_INFINITY):
            return mp.inf if bound == INFINITY else -mp.inf
        return numeric(self.value(bound))


def _approximate(node: Node) -> Any:
    return numeric(_Approximator({}, real=True).value(node))


def _to_sympy(node: Node) -> Any:
    if isinstance(node, Number):
        return sympy.Rational(node.value.numerator, node.value.denominator)
    if node in _SYMPY_CONSTANTS:
        return _SYMPY_CONSTANTS[node]
    if isinstance(node, Symbol):
        return sympy.Symbol(node.name, real=True)
    if node.function not in _TO_SYMPY:
        raise AnswerError(f"{node.function} is not integrated")
    return _TO_SYMPY[node.function](*map(_to_sympy, node.arguments))


def _from_sympy(value: Any) -> Node:
    if value in _CONSTANT_NODES:
        return _CONSTANT_NODES[value]
    if value == -sympy.oo:
        return NEGATIVE_INFINITY
    if value.is_Rational:
        return Number(Fraction(int(value.p), int(value.q)))
    if not value.args or value.has(sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit):
        raise AnswerError(f"no value in closed form: {value}")
    arguments = [_from_sympy(argument) for argument in value.args]
    if value.is_Add:
        return Apply("add", tuple(arguments))
    if value.is_Mul:
        return _product(arguments)
    if value.is_Pow:
        return Apply("pow", tuple(arguments))
    name = type(value).__name__
    return Apply(_FROM_SYMPY.get(name, name), tuple(arguments))


def _product(factors: list[Node]) -> Node:
    node = factors[0]
    for factor in factors[1:]:
        node = Apply("mul", (node, factor))
    return node
