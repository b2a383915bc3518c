from __future__ import annotations

import time

import pytest

from spiral_mega.rewards.response import boxed_answer, final_text, last_boxed


@pytest.mark.parametrize(
    ("response", "final"),
    [
        ("plain", "plain"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),  # the chat template opened <think> in the prompt
        ("a</think>b</think>c", "c"),
        ("<think>a", ""),
        ("<think>a</think>b<think>c", ""),
    ],
)
def test_only_what_follows_finished_thinking_counts(response: str, final: str) -> None:
    assert final_text(response) == final


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed {7}", "7"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{}", ""),
        ("\\boxed{1} \\boxed{}", ""),
        ("{{ \\boxed{3}", "3"),
        ("}} \\boxed{3}", "3"),
        ("\\boxed{4} and \\boxed{5", "4"),
        ("\\boxed{5", None),
        ("\\boxed 5", "5"),
        ("\\boxed5", "5"),
        ("\\boxed 57.", "57"),
        ("\\boxed\\frac{1}{2} and so on", "\\frac{1}{2}"),
        ("\\fbox{5}", "5"),
        ("\\boxedfoo 5", None),
        ("\\boxed", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_balanced_box_is_the_answer(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{1} and \\boxed{2}", "1, 2"),
        ("$\\boxed{1}$, $\\boxed{2}$ or $\\boxed{3}$", "1, 2, 3"),
        ("$x = \\boxed{1}$,\n$y = \\boxed{2}$", "x=1, y=2"),
        ("\\boxed{1} \\text{ or } \\boxed{2}", "1, 2"),
        ("\\boxed{4}. No: \\boxed{5}", "5"),
        ("\\boxed{1} \\boxed{2}", "2"),
        ("\\boxed{5}, \\boxed{5}", "5"),
        ("\\boxed{5", None),
    ],
)
def test_boxes_that_are_listed_are_one_answer(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 200_000, "\\boxed{1}" * 200_000, "\\boxed{" + "{" * 10**6, "\\" * 10**6]
)
def test_extraction_takes_linear_time(text: str) -> None:
    began = time.perf_counter()
    boxed_answer(text)
    assert time.perf_counter() - began < 2.0
