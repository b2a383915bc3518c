"""Two expressions are equal when they are, and only then: against exact fractions, and against sympy."""

from __future__ import annotations

from fractions import Fraction

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_mega.rewards.symbolic.equality import equal, is_constant, proportional
from spiral_mega.rewards.symbolic.expressions import parse_expression
from spiral_mega.rewards.symbolic.groups import group
from spiral_mega.rewards.symbolic.nodes import Node
from spiral_mega.rewards.symbolic.tokens import tokenize

small = st.integers(1, 60)
exact = settings(max_examples=60, deadline=None)


def parse(latex: str) -> Node:
    return parse_expression(group(tokenize(latex)))


def same(left: str, right: str) -> bool:
    return equal(parse(left), parse(right))


@exact
@given(st.fractions(), st.fractions())
def test_fractions_are_equal_when_they_are(one: Fraction, other: Fraction) -> None:
    left, right = (f"\\frac{{{value.numerator}}}{{{value.denominator}}}" for value in (one, other))
    assert same(left, right) == (one == other)
    assert same(left, f"{right}+\\frac{{{(one - other).numerator}}}{{{(one - other).denominator}}}")


@exact
@given(small, small, st.integers(1, 1500))
def test_a_denested_root_is_equal_and_the_smallest_change_is_seen(
    a: int, b: int, bits: int
) -> None:
    """sqrt(a) + sqrt(b) = sqrt(a + b + 2 sqrt(ab)), and not with 2^-bits added."""
    left, right = f"\\sqrt{{{a}}}+\\sqrt{{{b}}}", f"\\sqrt{{{a + b}+2\\sqrt{{{a * b}}}}}"
    assert same(left, right)
    assert not same(left, f"{right}+2^{{-{bits}}}")


@exact
@given(st.integers(1, 1500), st.integers(1, 1500))
def test_numbers_next_to_one_are_told_apart(first: int, second: int) -> None:
    assert same(f"1-2^{{-{first}}}", f"1-2^{{-{second}}}") == (first == second)
    assert same(f"\\pi-e^{{-{first}}}", f"\\pi-e^{{-{second}}}") == (first == second)


@exact
@given(
    st.lists(st.integers(-9, 9), min_size=2, max_size=5),
    st.lists(st.integers(-9, 9), min_size=2, max_size=5),
)
def test_products_of_polynomials_are_equal_to_their_expansion_and_to_nothing_else(
    a: list[int], b: list[int]
) -> None:
    x = sympy.Symbol("x")
    first, second = (
        sum(c * x**n for n, c in enumerate(coefficients)) + x for coefficients in (a, b)
    )
    expanded = sympy.expand(first * second)
    if not expanded.free_symbols:
        return
    product = f"({sympy.latex(first)})({sympy.latex(second)})"
    assert same(product, sympy.latex(expanded))
    assert not same(product, sympy.latex(expanded + 1))


IDENTITIES = [
    ("\\tan^2 y+1", "\\sec^2 y"),
    ("\\sin 3x", "3\\sin x-4\\sin^3 x"),
    ("\\ln x^2", "2\\ln x"),
    ("e^{2x}-1", "(e^x-1)(e^x+1)"),
    ("\\frac{1-x^{5}}{1-x}", "1+x+x^2+x^3+x^4"),
    ("\\binom{n}{3}", "\\frac{n(n-1)(n-2)}{6}"),
    ("(n+1)!", "(n+1) n!"),
    ("(-1)^n", "\\cos n\\pi"),
    ("\\lceil n/3\\rceil", "\\lfloor (n+2)/3\\rfloor"),
    ("\\sum_{k=1}^{n} k^2", "\\frac{n(n+1)(2n+1)}{6}"),
    ("\\sqrt{-3}", "i\\sqrt{3}"),
    ("e^{i\\pi}", "-1"),
    ("\\cos 36^\\circ", "\\frac{1+\\sqrt5}{4}"),
    ("\\arctan 2+\\arctan 3", "\\frac{3\\pi}{4}"),
    ("\\log_2 12", "2+\\frac{\\ln 3}{\\ln 2}"),
    ("\\int_0^1 x^2 dx", "\\frac13"),
    ("\\lim_{x\\to 0}\\frac{1-\\cos x}{x^2}", "\\frac12"),
    ("\\sum_{n=1}^{\\infty} \\frac{1}{n^2}", "\\frac{\\pi^2}{6}"),
    ("\\sqrt[3]{2+\\sqrt5}+\\sqrt[3]{2-\\sqrt5}", "1"),
]
NO_IDENTITIES = [
    ("\\sqrt{x^2}", "x"),
    ("|x|", "x"),
    ("\\lfloor x\\rfloor", "x"),
    ("\\lfloor\\sqrt{n}\\rfloor", "\\lfloor\\sqrt{n-1}\\rfloor"),
    ("\\sin x", "x"),
    ("f(2x)", "2f(x)"),
    ("f'(x)", "f(x)"),
    ("x", "X"),
    ("x_1", "x_2"),
    ("\\frac{dy}{dx}", "\\frac{y}{x}"),
    ("x^2", "x^2+10^{-300}"),
    ("1+e^{-1000}", "1"),
    ("\\frac{x}{x}", "\\frac{2x}{2x}"),
    ("x+y-y", "x"),
    ("\\int_0^1 x^2 dx", "0.33333"),
]


@pytest.mark.parametrize(("left", "right"), IDENTITIES)
def test_identities_hold_in_both_directions(left: str, right: str) -> None:
    assert same(left, right)
    assert same(right, left)


@pytest.mark.parametrize(("left", "right"), NO_IDENTITIES)
def test_what_is_no_identity_does_not(left: str, right: str) -> None:
    assert not same(left, right)
    assert not same(right, left)


@pytest.mark.parametrize(
    ("node", "constant"),
    [("x/x", True), ("x-x", True), ("\\sin^2 x+\\cos^2 x", True), ("x", False), ("x^2", False)],
)
def test_constants_in_disguise_are_found(node: str, constant: bool) -> None:
    assert is_constant(parse(node)) == constant


def test_equations_are_proportional_up_to_a_constant_alone() -> None:
    line = parse("y-2x-1")
    assert proportional(line, parse("4x+2-2y"), positive=False)
    assert not proportional(line, parse("4x+2-2y"), positive=True)
    assert not proportional(line, parse("x(y-2x-1)"), positive=False)
    assert not proportional(parse("N-N"), parse("2N-2N"), positive=False)
