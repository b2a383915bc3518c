"""LaTeX answers as text: tidying, comparison by spelling, plain numbers, and the screen for hostile ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 2000
MAX_DEPTH = 40
MAX_DIGITS = 400
MAX_EXPONENT = 20_000
MAX_FACTORIAL = 5_000

_DROPPED = re.compile(r"\\?\$|\\(?:left|right)(?![a-zA-Z])|\\[!,;:]|\\q?quad(?![a-zA-Z])")
_SPACE = re.compile(r"\s+(?!\d)|(?<!\d)\s+")  # all but those between digits
_SINGLE_SCRIPT = re.compile(r"([_^])\{(\w)\}")

_UNIT = re.compile(r"\^\{?\\circ\}?[CFK]?$|\\degree$|\\?%$|\\(?:text|mathrm|textrm)\{[^{}]*\}$")
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_POWER_OF_TEN = r"10\^(?:\{([+-]?\d{1,3})\}|(\d))"
_DECIMAL = re.compile(rf"([+-]?)({_UNSIGNED})(?:[eE]([+-]?\d{{1,3}})|\\(?:times|cdot){_POWER_OF_TEN})?")
_PURE_POWER = re.compile(rf"([+-]?){_POWER_OF_TEN}")
_FRACTION = re.compile(r"([+-]?)(?:\\frac\{([+-]?\d+)\}\{(\d+)\}|\\frac(\d)(\d)|(\d+)/(\d+))")

_CARET = r"(?:\^|\*\*)[{(]*[+-]?"
_POWER = re.compile(rf"{_CARET}(\d+)")
_TOWER = re.compile(rf"(?={_CARET}(\d+)[)}}]*{_CARET}(\d+))")  # looks ahead, so that towers may overlap
_VARIABLE_TOWER = re.compile(rf"(?:{_CARET}\\?\w+\s*){{4}}")
_FACTORIAL = re.compile(r"(\d+)[)}]*!|[)}!]!")


def tidy(text: str) -> str:
    """`text` without dollar signs, spacing commands and \\left, \\right; {,} is a comma and every fraction \\frac."""
    text = _DROPPED.sub("", text).replace("{,}", ",")
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").strip()


def spelling(text: str) -> str:
    """A key that is equal for two tidied texts that differ only in white space and the braces of one-letter scripts."""
    return _SINGLE_SCRIPT.sub(r"\1\2", _SPACE.sub("", text))


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """A literal number. `exact` says that it was written without a decimal point or exponent."""

    value: Fraction
    exact: bool
    percent: bool

    def equals(self, gold: PlainNumber) -> bool:
        """Whether this is `gold`: exactly if both are exact, else to the sixth decimal.

        Below 0.001 six decimals say nothing, so there it is one part in a million. 62.5 % is 62.5 and 0.625.
        """
        exact = self.exact and gold.exact
        return any(_close(mine, theirs, exact) for mine in self._readings() for theirs in gold._readings())

    def _readings(self) -> tuple[Fraction, ...]:
        return (self.value, self.value / 100) if self.percent else (self.value,)


def _close(value: Fraction, gold: Fraction, exact: bool) -> bool:
    if exact:
        return value == gold
    tolerance = Fraction(1, 2_000_000) if abs(gold) >= Fraction(1, 1000) else abs(gold) / 1_000_000
    return abs(value - gold) <= tolerance


def plain_number(text: str) -> PlainNumber | None:
    """The literal number that a tidied text is, a unit after it left out; None for anything else.

    Reads 1234, 1,234, -0.5, 4.5e33, 8.7 \\times 10^{8}, 10^{-3}, 3/4, \\frac{3}{4}, 336^\\circ, 8 \\%, 5 \\text{ cm}.
    """
    if len(text) > MAX_DIGITS:
        return None
    text = _SPACE.sub("", text).rstrip(".")
    bare = _UNIT.sub("", text)
    percent = text.endswith("%")
    if match := _DECIMAL.fullmatch(bare):
        sign, digits, *exponents = match.groups()
        exponent = next((int(e) for e in exponents if e), 0)
        value = Fraction(digits.replace(",", "")) * Fraction(10) ** exponent
        exact = "." not in digits and not any(exponents)
    elif match := _PURE_POWER.fullmatch(bare):
        sign, braced, single = match.groups()
        value, exact = Fraction(10) ** int(braced or single), True
    elif match := _FRACTION.fullmatch(bare):
        sign, *parts = match.groups()
        numerator, denominator = (int(part) for part in parts if part)
        if denominator == 0:
            return None
        value, exact = Fraction(numerator, denominator), True
    else:
        return None
    return PlainNumber(-value if sign == "-" else value, exact, percent)


def hostile(text: str) -> str | None:
    """Why a tidied text must not reach the parser, or None. Cheap; the time limit catches what it lets through.

    Real answers stay far below the limits: the longest in the six benchmarks that the tests sample has 230 characters.
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
    if any(match[1] is None or int(match[1]) > MAX_FACTORIAL for match in _FACTORIAL.finditer(text)):
        return f"a factorial of more than {MAX_FACTORIAL}, or of an expression"
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
