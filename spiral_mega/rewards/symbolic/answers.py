"""What an answer may be: a few kinds of small values, each compared in its own way (see compare.py)."""

from __future__ import annotations

from dataclasses import dataclass

from spiral_mega.rewards.symbolic.nodes import Node
from spiral_mega.rewards.symbolic.unit_table import Unit


@dataclass(frozen=True, slots=True)
class Value:
    """An expression or a number, with its unit if it has one."""

    node: Node
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A letter out of a multiple choice, and what stands after it."""

    letter: str
    content: Answer | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """Words, reduced to their letters and digits."""

    key: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Several answers: a list without brackets (`opening` is ""), a tuple, an interval or a set.

    `union` says that "or" joins them, which matters for inequalities.
    """

    items: tuple[Answer, ...]
    opening: str = ""
    closing: str = ""
    union: bool = False


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain such as a = b = c or 1 < x <= 2: signs[i] stands between sides[i] and sides[i + 1]."""

    sides: tuple[Answer, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetOperation:
    """Sets joined by one of cup, cap and setminus."""

    sign: str
    parts: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """a : b : c, or a time of day, which `half` (am or pm) or the digits as written may tell."""

    terms: tuple[Node, ...]
    literal: str
    half: str = ""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of answers. `environment` tells determinants and definitions by cases from matrices."""

    rows: tuple[tuple[Answer, ...], ...]
    environment: str


@dataclass(frozen=True, slots=True)
class Unread:
    """What is none of these, as it is spelt."""

    spelling: str


Answer = Value | Choice | Text | Sequence | Relation | SetOperation | Ratio | Matrix | Unread

EMPTY_SET = Sequence((), "\\{", "\\}")
