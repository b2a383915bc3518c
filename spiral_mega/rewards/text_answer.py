"""Kind `exact`: equality of text."""

from __future__ import annotations

from spiral_mega.rewards.answers import clean_text
from spiral_mega.rewards.response import final_text, last_boxed


def score(response: str, answer: tuple[str, ...]) -> float:
    """1.0 if the last \\boxed{...} (without any: the whole final text) is one of `answer`, outer
    white space aside.

    Both sides are cleaned as ground truths are, so "142.0" is "142".
    """
    return float(_answer(response) in set(map(clean_text, answer)))


def answer_of(response: str) -> str | None:
    """The last boxed answer, or the whole final text; None if it is empty."""
    return _answer(response) or None


def _answer(response: str) -> str:
    text = final_text(response)
    boxed = last_boxed(text)
    return clean_text(text if boxed is None else boxed)
