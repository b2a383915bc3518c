"""Accepted ground truths as text: one form for what data files write as strings, numbers and arrays."""

from __future__ import annotations

import math
import re
from typing import Any

_INTEGRAL_DECIMAL = re.compile(r"([+-]?\d+)\.0+")
_REMEDY = "give a string, a finite number, or a non-empty list of these"


def normalize_answer(answer: Any) -> tuple[str, ...]:
    """The accepted ground truths of a problem, as text, without repeats; any one of them is a right
    answer.

    Takes a string, int, float, bool, or a list, tuple or array of these. Outer whitespace goes, and
    an integral decimal becomes an integer (142.0 and "142.0" -> "142"); "025" and LaTeX stay as
    written. Normalising twice changes nothing. Several elements are alternatives because that is
    what arrays in the field hold: in Minerva they are other spellings or roundings of one answer
    (["4.4e7", "4.4 \\times 10^7"], ["6630.65", "6630"]). An answer that consists of several values
    is one string ("$69$,$84$" in OlympiadBench).

    Raises ValueError for None, an empty string or list, a number that is not finite, or any other
    type.
    """
    if hasattr(answer, "tolist"):  # numpy arrays and scalars, without importing numpy
        answer = answer.tolist()
    elements = list(answer) if isinstance(answer, list | tuple) else [answer]
    if not elements:
        raise ValueError(f"the answer {answer!r} is empty: {_REMEDY}")
    return tuple(dict.fromkeys(_element_text(element) for element in elements))


def clean_text(text: str) -> str:
    """`text` without outer whitespace; an integral decimal as an integer."""
    text = text.strip()
    match = _INTEGRAL_DECIMAL.fullmatch(text)
    return match[1] if match else text


def _element_text(element: Any) -> str:
    if hasattr(element, "tolist"):
        element = element.tolist()
    if isinstance(element, float):
        if not math.isfinite(element):
            raise ValueError(f"the answer {element!r} is not finite: {_REMEDY}")
        return str(int(element)) if element.is_integer() and abs(element) < 1e16 else repr(element)
    if isinstance(element, bool | int):
        return str(element)
    if not isinstance(element, str):
        raise ValueError(f"the answer {element!r} is of type {type(element).__name__}: {_REMEDY}")
    if not (text := clean_text(element)):
        raise ValueError(f"the answer {element!r} is empty: {_REMEDY}")
    return text
