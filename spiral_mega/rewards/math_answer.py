"""Kind `math`: the last boxed answer equals one of the ground truths, by spelling, as a number, or symbolically."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

import math_verify
import sympy

from spiral_mega.rewards.latex import hostile, plain_number, spelling, tidy
from spiral_mega.rewards.response import final_text, last_boxed

_BOXED_ONLY = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
_E_NOTATION = re.compile(r"(\d)[eE]([+-]?\d{1,3})(?![\d.])")
_SMALL = 1e-3

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its signal-based time limit is off


def score(response: str, answer: tuple[str, ...]) -> float:
    """1.0 if the last \\boxed{...} of the final text is any of `answer`; 0.0 if it is not, or if there is none."""
    given = answer_of(response)
    return float(given is not None and any(_equal(tidy(gold), given) for gold in answer))


def answer_of(response: str) -> str | None:
    """The last boxed answer, tidied; None if there is none."""
    content = last_boxed(final_text(response))
    return (tidy(content) if content is not None else None) or None


def agree(response: str, answers: tuple[str, ...]) -> float:
    """1.0 if the response's answer equals any of `answers` when either of the two is read as the ground truth."""
    given = answer_of(response)
    if given is None or hostile(given) is not None:
        return 0.0
    return float(any(hostile(a) is None and (_equal(a, given) or _equal(given, a)) for a in answers))


def _equal(gold: str, given: str) -> bool:
    if spelling(gold) == spelling(given):
        return True
    gold_number, given_number = plain_number(gold), plain_number(given)
    if gold_number and given_number:
        return given_number.equals(gold_number)
    return hostile(given) is None and _symbolically_equal(gold, given)


def _symbolically_equal(gold: str, given: str) -> bool:
    parsed_gold, parsed_given = _parse(gold), _parse(given)
    if not math_verify.verify(parsed_gold, parsed_given, timeout_seconds=None):
        return False
    return not (parsed_gold and parsed_given) or _same_if_small(parsed_gold[0], parsed_given[0])


def _same_if_small(gold: Any, given: Any) -> bool:
    """math-verify rounds to six decimals, which makes all small numbers equal: compare those relatively."""
    if not all(isinstance(value, sympy.Expr) and value.is_number for value in (gold, given)):
        return True
    gold_value, given_value = complex(gold.doit()), complex(given.doit())
    return abs(gold_value) >= _SMALL or abs(given_value - gold_value) <= 1e-6 * abs(gold_value)


@lru_cache(maxsize=1024)
def _parse(text: str) -> list[Any]:
    text = _E_NOTATION.sub(r"\1 \\times 10^{\2}", text)  # it takes 4.5e33 for 4.5 * e * 33
    return list(math_verify.parse(f"\\boxed{{{text}}}", _BOXED_ONLY, parsing_timeout=None))
