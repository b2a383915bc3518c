"""Sets of numbers in LaTeX contain the numbers that their conditions hold for."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_mega.rewards.symbolic.equality import number
from spiral_mega.rewards.symbolic.nodes import INFINITY, NEGATIVE_INFINITY, Node
from spiral_mega.rewards.symbolic.reader import read
from spiral_mega.rewards.symbolic.realsets import RealSet, real_set, same_set

SAMPLES = [Fraction(half, 2) for half in range(-30, 31)]
ends = st.integers(-12, 12)


def parsed(latex: str) -> RealSet:
    found = real_set(read(latex).answers[0])
    assert found is not None
    return found


def position(node: Node) -> float:
    if node in (INFINITY, NEGATIVE_INFINITY):
        return float("inf") if node == INFINITY else float("-inf")
    return float(number(node))


def members(found: RealSet) -> list[Fraction]:
    inside = []
    for sample in SAMPLES:
        for piece in found.pieces:
            low, high = position(piece.low), position(piece.high)
            if (
                low < sample < high
                or (sample == low and piece.has_low)
                or (sample == high and piece.has_high)
            ):
                inside.append(sample)
    return inside


def interval(low: int, high: int, has_low: bool, has_high: bool) -> tuple[str, set[Fraction]]:
    latex = f"{'[' if has_low else '('}{low},{high}{']' if has_high else ')'}"
    inside = {
        x for x in SAMPLES if low < x < high or (x == low and has_low) or (x == high and has_high)
    }
    return latex, inside


intervals = st.builds(
    lambda low, size, has_low, has_high: interval(low, low + size, has_low, has_high),
    ends,
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(intervals, min_size=2, max_size=4), st.sampled_from(["cup", "cap", "setminus"]))
def test_operations_on_intervals_are_those_on_their_members(
    parts: list[tuple[str, set[Fraction]]], sign: str
) -> None:
    expected = parts[0][1]
    for _, inside in parts[1:]:
        expected = {
            "cup": expected | inside,
            "cap": expected & inside,
            "setminus": expected - inside,
        }[sign]
    found = parsed(f" \\{sign} ".join(latex for latex, _ in parts))
    assert members(found) == sorted(expected)


@settings(max_examples=100, deadline=None)
@given(st.integers(-5, 5), ends, st.sampled_from(["<", ">", "\\le", "\\ge", "\\ne"]))
def test_a_linear_inequality_holds_for_its_solutions(slope: int, start: int, sign: str) -> None:
    if slope == 0:
        return
    holds = {
        "<": lambda left: left < 3,
        ">": lambda left: left > 3,
        "\\le": lambda left: left <= 3,
        "\\ge": lambda left: left >= 3,
        "\\ne": lambda left: left != 3,
    }[sign]
    found = parsed(f"{slope}x+{start} {sign} 3".replace("+-", "-"))
    assert members(found) == [x for x in SAMPLES if holds(slope * x + start)]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("|x|<2", "(-2,2)"),
        ("|x-1|\\ge 2", "(-\\infty,-1]\\cup[3,\\infty)"),
        ("1<x\\le 2", "(1,2]"),
        ("x<1 \\text{ or } x>2", "(2,\\infty)\\cup(-\\infty,1)"),
        ("\\mathbb{R}\\setminus\\{0,1\\}", "(-\\infty,0)\\cup(0,1)\\cup(1,\\infty)"),
        ("(0,1]\\cup(1,2)", "(0,2)"),
        ("(0,\\sqrt2)\\cup\\{5\\}", "\\{5\\}\\cup(0,2^{1/2})"),
        ("a<x<b", "(a,b)"),
    ],
)
def test_the_same_set_in_another_form(left: str, right: str) -> None:
    assert same_set(parsed(left), parsed(right))
