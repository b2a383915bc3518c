"""What the `math` kind takes for equal, in this process: the functions are pure."""

from __future__ import annotations

import pytest

from spiral_mega.rewards.latex import hostile, tidy
from spiral_mega.rewards.math_answer import score

EQUAL = [
    ("025", "25"),
    ("1,234", "1234"),
    ("1234", "1{,}234"),
    ("1234567", "1\\,234\\,567"),
    ("1234", "1,234.0"),
    ("1000", "\\$1,000"),
    ("9.6", "9.60"),
    ("8.7 \\times 10^{8}", "870000000"),
    ("8.7 \\times 10^{8}", "8.7e8"),
    ("4.5e33", "4.5 \\cdot 10^{33}"),
    ("1.325 \\times 10^{-27}", "\\frac{1.325}{10^{27}}"),
    ("10^{-3}", "0.001"),
    ("\\frac{1}{2}", "0.5"),
    ("\\frac{1}{2}", "\\dfrac12"),
    ("-3/2", "-\\frac{3}{2}"),
    ("1/3", "0.333333"),
    ("336^\\circ", "336"),
    ("41.8^{\\circ}", "41.8^\\circ"),
    ("62.5%", "62.5"),
    ("8 \\%", "0.08"),
    ("5", "5 \\text{ cm}"),
    ("5", "x = 5"),
    ("k=1", "1"),
    ("$69$,$84$", "84, 69"),
    ("E_{1},E_{2}", "E_1, E_2"),
    ("9 \\sqrt{15}", "\\sqrt{1215}"),
    ("14+4\\sqrt{37}", "4\\sqrt{37} + 14"),
    ("2^{25} \\cdot 26!", "26! \\cdot 2^{25}"),
    ("\\frac{e^{at}-e^{-at}}{2a}", "\\frac{1}{2a}\\left(e^{at}-e^{-at}\\right)"),
    ("(-\\infty, 0) \\cup\\{1\\}", "\\left(-\\infty,0\\right)\\cup\\left\\{1\\right\\}"),
    ("\\text{B}", "B"),
]
DIFFERENT = [
    ("025", "26"),
    ("1,234", "1235"),
    ("12", "1 2"),
    ("204", "204, 205"),
    ("204", "204 \\text{ or } 205"),
    ("69,84", "69"),
    ("(2,4)", "(4,2)"),
    ("0.022", "0.0221"),
    ("1/3", "0.3333"),
    ("4.5e33", "4.6e33"),
    ("1e-5", "1e-6"),
    ("1.325 \\times 10^{-27}", "5 \\times 10^{-27}"),  # math-verify alone rounds both to zero
    ("1.325 \\times 10^{-27}", "\\frac{5}{10^{27}}"),
    ("1.325 \\times 10^{-27}", "0"),
    ("1000000", "1000000.5"),
    ("k=1", "k=2"),
    ("f(x)=2x", "g(x)=2x"),
    ("\\sqrt{23}-2 \\sqrt{3}", "\\sqrt{23}+2 \\sqrt{3}"),
    ("MR=SRMC", "MR=SRAC"),
    ("5", ""),
    ("5", "$ $"),
    ("5", "1/0"),
]


@pytest.mark.parametrize(("gold", "given"), EQUAL)
def test_other_writings_of_the_answer_are_right(gold: str, given: str) -> None:
    assert score(f"So \\boxed{{{given}}}.", (gold,)) == 1.0


@pytest.mark.parametrize(("gold", "given"), DIFFERENT)
def test_other_answers_are_wrong(gold: str, given: str) -> None:
    assert score(f"So \\boxed{{{given}}}.", (gold,)) == 0.0


def test_any_of_several_ground_truths_is_right() -> None:
    assert [score(f"\\boxed{{{x}}}", ("6630.65", "6630")) for x in ("6630.65", "6630", "6631")] == [
        1.0,
        1.0,
        0.0,
    ]


@pytest.mark.parametrize(
    "response",
    ["5", "The answer is 5.", "<think>\\boxed{5}", "\\boxed{5}</think>It is 5.", "\\boxed{5"],
)
def test_without_a_box_in_the_final_text_there_is_no_reward(response: str) -> None:
    assert score(response, ("5",)) == 0.0


def test_the_last_box_counts() -> None:
    assert score("\\boxed{4} no, \\boxed{5}", ("5",)) == 1.0
    assert score("\\boxed{5} no, \\boxed{4}", ("5",)) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9**9",
        "9^{9^{9^{9}}}",
        "9^{9^{9}}",
        "10^{10^{10}}",
        "2^{99999999}",
        "x^{a^{b^{c^{d}}}}",
        "(9!)!",
        "9!!!",
        "1000000!",
        "7" * 401,
        "x" * 2001,
        "{" * 41 + "}" * 41,
        "((((" * 11,
    ],
)
def test_the_screen_stops_what_would_cost_the_time_limit(text: str) -> None:
    assert hostile(tidy(text)) is not None


@pytest.mark.parametrize(
    "text",
    [
        "2^{2^{10}}",
        "e^{-x^{2}}",
        "e^{e^{x}}",
        "3^{3^{3}}",
        "\\frac{4 \\cdot 999^{4}}{27}",
        "2^{1009}",
        "\\frac{100!}{2^{50}}",
        "2^{25} \\cdot 26!",
        "3.21 \\times 10^{13}",
        "\\frac{1}{1+\\frac{1}{1+\\frac{1}{1+\\frac{1}{1+\\frac{1}{2}}}}}",
        ", ".join(f"({i}, {i * i})" for i in range(100)),
        "+".join(f"{i}x^{{{i}}}" for i in range(100)),
        "31415926535897932384626433832795028841971" * 5,
    ],
)
def test_the_screen_lets_long_honest_answers_through(text: str) -> None:
    assert hostile(tidy(text)) is None


def test_a_hostile_text_is_still_right_when_it_is_the_ground_truth() -> None:
    assert score("\\boxed{9^{9^{9^{9}}}}", ("$9^{9^{9^9}}$",)) == 1.0
