"""LaTeX text to answers: lists, choices, relations, intervals and sets, ratios, matrices, words,
values with units.

    text -> tokens -> [choice] -> parts of a list -> sides of a relation -> brackets, or a value and its unit

Text has two readings where commas are ambiguous: 100,200 is one number, or a list of two.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from spiral_mega.rewards.symbolic.answers import (
    EMPTY_SET,
    Answer,
    Choice,
    Matrix,
    Ratio,
    Relation,
    Sequence,
    SetOperation,
    Unread,
    Value,
)
from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.expressions import parse_expression
from spiral_mega.rewards.symbolic.groups import (
    Group,
    Item,
    Items,
    group,
    is_command,
    is_group,
    is_mark,
    is_word,
    spell,
    split,
)
from spiral_mega.rewards.symbolic.literals import may_be_list
from spiral_mega.rewards.symbolic.measures import has_number, read_value
from spiral_mega.rewards.symbolic.nodes import Symbol
from spiral_mega.rewards.symbolic.tokens import Kind, Token, spelling, tokenize
from spiral_mega.rewards.symbolic.vocabulary import vocabulary
from spiral_mega.rewards.symbolic.words import (
    points_in_order,
    prose_as_words,
    text_of,
)
from spiral_mega.rewards.symbolic.wrapping import (
    CHOICES,
    split_choice,
    without_condition,
    without_ends,
    without_label,
)

_COMMA_NUMBER = re.compile(r"\d,\d{3}(?!\d)")
_SIGNS = vocabulary(
    """
    le ge ne approx equiv in notin sim cong to propto subset subseteq perp parallel implies
    Rightarrow iff Leftrightarrow ll gg
    """
)
_CHOICE_SYMBOLS = frozenset(map(Symbol, CHOICES))
_SET_SIGNS = ("cup", "cap", "setminus")
_LAYOUTS = vocabulary(
    """
    aligned align gathered gather equation split alignedat flalign multline eqnarray displaymath
    """
)
_COLUMNS = vocabulary(
    """
    matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array tabular cases dcases rcases
    """
)


class Reading(NamedTuple):
    """What an answer may mean, and the numbers in a condition after it ("where n > 2"), which is not read further."""

    answers: tuple[Answer, ...]
    condition: tuple[str, ...] = ()


@lru_cache(maxsize=2048)
def read(latex: str) -> Reading:
    """Read an answer. Text that is no answer of a known form is Unread, and equal to itself only."""
    try:
        tokens = tokenize(latex)
    except AnswerError:
        return Reading((Unread("".join(latex.split())),))
    tokens, condition = without_condition(tokens)
    answers = [_read_tokens(tokens)]
    if _COMMA_NUMBER.search(latex) and may_be_list(latex):
        answers.append(_read_tokens(without_condition(tokenize(latex, thousands=False))[0]))
    numbers = tuple(token.text for token in condition if token.kind is Kind.NUMBER)
    return Reading(tuple(dict.fromkeys(answers)), numbers)


def _read_tokens(tokens: list[Token]) -> Answer:
    tokens = without_label(prose_as_words(without_ends(tokens)))
    try:
        return _read_choice(tokens) or _read_list(group(tokens))
    except (AnswerError, RecursionError):
        return Unread(spelling(tokens))


def _read_choice(tokens: list[Token]) -> Answer | None:
    """A choice with what its letter stands for; None for what is no choice, or names two."""
    choice = split_choice(tokens)
    if choice is None:
        return None
    letter, rest = choice
    content = _read_tokens(rest) if rest else None
    return None if content is not None and _names_choice(content) else Choice(letter, content)


def _names_choice(answer: Answer) -> bool:
    """Whether an answer names a choice anywhere: two letters are no choice."""
    if isinstance(answer, Sequence):
        return any(map(_names_choice, answer.items))
    return isinstance(answer, Choice) or (
        isinstance(answer, Value) and answer.node in _CHOICE_SYMBOLS
    )


# Lists


def _read_list(items: Items) -> Answer:
    items = _unwrapped(items)
    parts, separators = split(items, _is_separator)
    answers = [_read_item(part) for part in parts if part]
    answers = _without_quantifiers(answers)
    if not answers:
        raise AnswerError("nothing to read")
    if len(answers) == 1:
        return answers[0]
    union = any(
        is_word(sign, "or") or is_command(sign, "lor") or spell((sign,)) == "or"
        for sign in separators
    )
    return Sequence(tuple(answers), union=union)


def _is_separator(item: Item) -> bool:
    if not isinstance(item, Token):
        return False
    if item.kind in (Kind.WORD, Kind.LETTERS):
        return item.text in ("and", "or")
    return is_mark(item, ",", ";", "\\\\", "\\quad") or is_command(item, "lor", "land")


def _unwrapped(items: Items) -> Items:
    """Without braces, and without an environment that only lays out, around all of the answer."""
    while len(items) == 1 and isinstance(items[0], Group):
        inner = items[0]
        if inner.opening in _LAYOUTS:
            items = tuple(item for item in inner.items if not is_mark(item, "&"))
            items = _joined_chain(items)
        elif inner.opening == "{":
            items = inner.items
        else:
            break
    return items


def _joined_chain(items: Items) -> Items:
    """Lines of an aligned environment; those that begin with a sign of relation continue the line before."""
    lines, _ = split(items, lambda item: is_mark(item, "\\\\"))
    joined: list[Item] = []
    for line in filter(None, lines):
        if joined and not _is_relation_sign(line[0]):
            joined.append(Token(Kind.MARK, "\\\\"))
        joined.extend(line)
    return tuple(joined)


def _without_quantifiers(answers: list[Answer]) -> list[Answer]:
    """Without parts such as k in Z after another answer."""
    kept = answers[:1]
    for answer in answers[1:]:
        if not _is_quantifier(answer):
            kept.append(answer)
    return kept


def _is_quantifier(answer: Answer) -> bool:
    """Whether an answer says of a variable in which number set it is."""
    if not isinstance(answer, Relation) or answer.signs != ("in",):
        return False
    variable, numbers = answer.sides
    is_variable = isinstance(variable, Value) and isinstance(variable.node, Symbol)
    return is_variable and isinstance(numbers, Unread) and numbers.spelling.startswith("\\mathbb")


# Items of a list


def _read_item(items: Items) -> Answer:
    """One part of a list: words, a relation, a ratio, or what can be a side of a relation."""
    items = _unwrapped(items)
    if any(_is_separator(item) for item in items):
        return _read_list(items)
    while (items and is_mark(items[0], "=")) or (items and is_command(items[0], "approx", "sim")):
        items = items[1:]
    while items and is_mark(items[-1], ".", ":"):
        items = items[:-1]
    words = text_of(items) or points_in_order(items)
    if words is not None:
        return words
    sides, signs = split(items, _is_relation_sign)
    if signs:
        if len(sides) == 2 and not sides[1]:
            raise AnswerError("a relation without a right side")
        names = tuple(spell((sign,)) for sign in signs)
        return Relation(tuple(map(_read_side, sides)), names)
    terms, colons = split(items, lambda item: is_mark(item, ":") or is_word(item, "to"))
    if colons:
        return _read_ratio(terms)
    return _read_side(items)


def _is_relation_sign(item: Item) -> bool:
    return is_mark(item, "=", "<", ">") or is_command(item, *_SIGNS)


def _read_ratio(terms: list[Items]) -> Answer:
    """A ratio, or a time of day; a label before a colon is left out."""
    if (
        len(terms) == 2
        and not any(has_number(item) for item in terms[0])
        and any(is_word(item) for item in terms[0])
    ):
        return _read_item(terms[1])
    half = spell(terms[-1]).lower().rstrip(".")[-3:].replace(".", "")
    last = terms[-1]
    if half[-2:] in ("am", "pm"):
        last = last[:1]
    nodes = tuple(map(parse_expression, (*terms[:-1], last)))
    literal = ":".join(spell(term) for term in (*terms[:-1], last))
    return Ratio(nodes, literal, half[-2:] if half[-2:] in ("am", "pm") else "")


def _read_side(items: Items) -> Answer:
    items = _unwrapped(items)
    if not items:
        raise AnswerError("nothing to read")
    items = _with_set_difference(items)
    parts, signs = split(items, lambda item: is_command(item, *_SET_SIGNS))
    if signs:
        names = {spell((sign,)) for sign in signs}
        if len(names) > 1:
            raise AnswerError("a union and another operation without brackets")
        return SetOperation(names.pop(), tuple(map(_read_side, parts)))
    if is_command(items[0], "varnothing") and len(items) == 1:
        return EMPTY_SET
    if len(items) == 1 and isinstance(items[0], Group):
        bracketed = _read_brackets(items[0])
        if bracketed is not None:
            return bracketed
    if len(items) == 2 and _is_point(items[0]) and isinstance(items[1], Group):
        coordinates = _read_brackets(items[1])
        if coordinates is not None:
            return coordinates
    words = text_of(items)
    return words if words is not None else read_value(items)


def _with_set_difference(items: Items) -> Items:
    """Read the minus sign of \\mathbb{R} - {0} as a difference of sets."""
    is_number_set = isinstance(items[0], Token) and items[0].text.startswith("mathbb")
    if is_number_set and len(items) > 2 and is_mark(items[1], "-"):
        return (items[0], Token(Kind.COMMAND, "setminus"), *items[2:])
    return items


def _is_point(item: Item) -> bool:
    """Whether an item is a capital letter, which names the point in P(1, 2)."""
    return (
        isinstance(item, Token)
        and item.kind is Kind.LETTERS
        and len(item.text) == 1
        and item.text.isupper()
    )


def _read_brackets(brackets: Group) -> Answer | None:
    """A tuple, interval, set or matrix; None for brackets around one expression."""
    opening, closing, inner = brackets
    if opening in _COLUMNS:
        return _read_rows(inner, opening)
    if opening == "\\{":
        return _read_set(inner)
    if len(inner) == 1 and is_group(inner[0], *_COLUMNS):  # an array in brackets of its own
        return _read_brackets(inner[0])  # type: ignore[arg-type]  # a group
    if opening not in ("(", "[", "langle") or not any(is_mark(item, ",", ";") for item in inner):
        return None
    parts, _ = split(inner, lambda item: is_mark(item, ",", ";"))
    if not all(parts):
        raise AnswerError("an empty place in a tuple")
    return Sequence(tuple(map(_read_item, parts)), opening, closing)


def _read_set(items: Items) -> Answer:
    """A set by its members, or by a condition: {x | x > 2}."""
    parts, bars = split(items, lambda item: is_mark(item, "|", ":") or is_command(item, "mid"))
    if len(bars) == 1 and all(parts):
        return _read_list(parts[1])
    if not items:
        return EMPTY_SET
    members, _ = split(items, lambda item: is_mark(item, ",", ";"))
    return Sequence(tuple(_read_item(member) for member in members if member), "\\{", "\\}")


def _read_rows(items: Items, environment: str) -> Answer:
    """A matrix; its only entry if it has one; a list if its one column holds relations (a system)."""
    lines, _ = split(items, lambda item: is_mark(item, "\\\\"))
    rows = []
    for line in lines:
        cells, _ = split(line, lambda item: is_mark(item, "&"))
        if any(cells):
            rows.append(tuple(_read_list(_without_comma(cell)) for cell in cells if cell))
    if len(rows) == 1 and len(rows[0]) == 1:
        return rows[0][0]
    is_system = all(len(row) == 1 for row in rows) and (
        environment.endswith("cases") or environment == "array"
    )
    if is_system and any(isinstance(row[0], Relation) for row in rows):
        return Sequence(tuple(row[0] for row in rows))
    return Matrix(
        tuple(rows), "cases" if environment.endswith("cases") else environment[:1] + "matrix"
    )


def _without_comma(items: Items) -> Items:
    return items[:-1] if items and is_mark(items[-1], ",", ".", ";") else items
