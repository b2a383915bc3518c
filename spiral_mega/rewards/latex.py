"""LaTeX answers as text: tidying, and the screen for hostile ones."""

from __future__ import annotations

import re

MAX_CHARS = 2000
MAX_DEPTH = 40
MAX_DIGITS = 400
MAX_EXPONENT = 20_000
MAX_FACTORIAL = 5_000

_DROPPED = re.compile(r"(?<!\\)\$|\\(?:left|right)(?![a-zA-Z])|\\[!,;:]")
_SPACE = re.compile(r"\s+(?!\d)|(?<!\d)\s+")  # all but those between digits

_CARET = r"(?:\^|\*\*)[{(]*[+-]?"
_POWER = re.compile(rf"{_CARET}(\d+)")
_TOWER = re.compile(
    rf"(?={_CARET}(\d+)[)}}]*{_CARET}(\d+))"
)  # looks ahead, so that towers may overlap
_VARIABLE_TOWER = re.compile(rf"(?:{_CARET}\\?\w+\s*){{4}}")
_FACTORIAL = re.compile(r"(\d+)[)}]*!")
_FACTORIAL_OF_FACTORIAL = re.compile(r"![)}]+!|!!!")


def tidy(text: str) -> str:
    """Drop dollar signs, spacing commands and \\left, \\right from `text`; every fraction becomes \\frac."""
    text = _DROPPED.sub("", text)
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").strip()


def hostile(text: str) -> str | None:
    """Why a tidied text must not reach the parser, or None. Cheap; the time limit catches what it
    lets through.

    Real answers stay far below the limits: the longest in the six benchmarks that the tests sample
    has 230 characters.
    """
    if len(text) > MAX_CHARS:
        return f"{len(text)} characters, more than {MAX_CHARS}"
    text = _SPACE.sub("", text)
    if _depth(text) > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH}"
    if re.search(rf"\d{{{MAX_DIGITS + 1}}}", text):
        return f"more than {MAX_DIGITS} digits in a row"
    if any(int(match[1]) > MAX_EXPONENT for match in _POWER.finditer(text)):
        return f"an exponent beyond {MAX_EXPONENT}"
    if any(_power_exceeds(int(m[1]), int(m[2]), MAX_EXPONENT) for m in _TOWER.finditer(text)):
        return f"a tower of exponents beyond {MAX_EXPONENT}"
    if _VARIABLE_TOWER.search(text):
        return "a tower of exponents"
    if _FACTORIAL_OF_FACTORIAL.search(text) or any(
        int(match[1]) > MAX_FACTORIAL for match in _FACTORIAL.finditer(text)
    ):
        return f"a factorial of more than {MAX_FACTORIAL}, or of a factorial"
    return None


def _power_exceeds(base: int, exponent: int, bound: int) -> bool:
    return base > 1 and (exponent > bound.bit_length() or base**exponent > bound)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth -= 1
    return deepest
