"""LaTeX text to answers: lists, choices, relations, intervals and sets, ratios, matrices, words, values with units.

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
    Unit,
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
from spiral_mega.rewards.symbolic.nodes import Apply, Number, Symbol
from spiral_mega.rewards.symbolic.tokens import Kind, Token, spelling, tokenize
from spiral_mega.rewards.symbolic.units import split_unit
from spiral_mega.rewards.symbolic.words import leaves_number_alone, looks_like_word, prose_as_words, text_of

_COMMA_NUMBER = re.compile(r"\d,\d{3}(?!\d)")
_SIGNS = ("le", "ge", "ne", "approx", "equiv", "in", "notin", "sim", "cong", "to", "propto", "subset", "subseteq", "perp",
          "parallel", "implies", "Rightarrow", "iff", "Leftrightarrow", "ll", "gg")  # fmt: skip
_SET_SIGNS = ("cup", "cap", "setminus")
_LAYOUTS = frozenset("aligned align gathered gather equation split alignedat flalign multline eqnarray displaymath".split())
_COLUMNS = frozenset("matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array tabular cases dcases rcases".split())
_LABELS = frozenset(
    "the a final correct answer answers ans is are so thus therefore hence we get have result option choice solution "
    "solutions value values and equals equal to exactly approximately about approx roughly".split()
)
_NAMING_LABELS = frozenset("answer answers ans result option choice exactly approximately about approx roughly".split())
_TAILS = frozenset({"where", "for", "with"})
_TAIL_OBJECTS = frozenset("all any every each some integer integers real constant constants".split())
_OPENING = frozenset({"(", "[", "{", "\\{"})
_CLOSING = frozenset({")", "]", "}", "\\}"})
_CHOICES = frozenset("ABCDEFGHIJ")
_CHOICE_SYMBOLS = frozenset(map(Symbol, _CHOICES))


_OTHER_CHOICE = re.compile(r"\([A-J]\)")


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
    tokens, condition = _without_condition(tokens)
    answers = [_read_tokens(tokens)]
    if _COMMA_NUMBER.search(latex) and may_be_list(latex):
        answers.append(_read_tokens(_without_condition(tokenize(latex, thousands=False))[0]))
    numbers = tuple(token.text for token in condition if token.kind is Kind.NUMBER)
    return Reading(tuple(dict.fromkeys(answers)), numbers)


def _read_tokens(tokens: list[Token]) -> Answer:
    tokens = _without_label(prose_as_words(_without_ends(tokens)))
    try:
        choice = _choice(tokens)
        return choice if choice is not None else _read_list(group(tokens))
    except (AnswerError, RecursionError):
        return Unread(spelling(tokens))


# Around the answer: punctuation, "the answer is", the letter of a choice


def _without_ends(tokens: list[Token]) -> list[Token]:
    """Without the punctuation, and Markdown's asterisks, around the answer."""
    start, end = 0, len(tokens)
    while end > start and tokens[end - 1].kind is Kind.MARK and tokens[end - 1].text in ",;.:^\\\\\\quad":
        end -= 1
    while start < end and tokens[start].kind is Kind.MARK and tokens[start].text in ",;:^=\\\\\\quad":
        start += 1
    return tokens[start:end]


def _without_condition(tokens: list[Token]) -> tuple[list[Token], list[Token]]:
    """The tokens before, and from, a condition such as "where C is a constant" or "for all x"."""
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token.text in _OPENING) - (token.text in _CLOSING)
        is_word = token.kind in (Kind.WORD, Kind.LETTERS) and token.text in _TAILS
        if index == 0 or depth or not is_word:
            continue
        if token.text == "where" or "".join(other.text for other in tokens[index + 1 : index + 2]) in _TAIL_OBJECTS:
            return tokens[:index], tokens[index:]
    return tokens, []


def _without_label(tokens: list[Token]) -> list[Token]:
    """Without words such as "the final answer is" before the answer."""
    end, named = 0, False
    for token in tokens:
        word = token.text.lower()
        if token.kind in (Kind.WORD, Kind.LETTERS) and word in _LABELS and (len(word) > 1 or not named):
            named |= word in _NAMING_LABELS
        elif not (end and token.kind is Kind.MARK and token.text in ":="):
            break
        end += 1
    tokens = tokens[end:] if named and end < len(tokens) else tokens
    last = max((index for index, token in enumerate(tokens) if token.text.lower() not in _LABELS), default=-1)
    is_named = any(token.text.lower() in ("answer", "answers") for token in tokens[last + 1 :])
    return tokens[: last + 1] if is_named and last >= 0 else tokens


def _choice(tokens: list[Token]) -> Answer | None:
    """(A), A), A. or A: with or without what the letter stands for."""
    bare = [token for token in tokens[:5] if token.text not in ("{", "}")]
    if len(bare) != len(tokens[:5]) and tokens[0].text == "{":
        tokens = [*bare, *tokens[5:]]
    letter = tokens[1:2] if tokens and tokens[0].text in ("(", "[") else tokens[:1]
    if not letter or letter[0].text not in _CHOICES or letter[0].kind not in (Kind.LETTERS, Kind.WORD):
        return None
    in_brackets = letter[0] is not tokens[0]
    end = 2 if in_brackets else 1
    mark = tokens[end].text if end < len(tokens) else "."
    if mark not in ((")", "]") if in_brackets else (")", ".", ":")):
        return None
    rest = tokens[end + 1 :]
    if not rest:
        return Choice(letter[0].text)
    if _OTHER_CHOICE.search(spelling(rest)):
        return None
    if _continues(rest[0], spaced_bracket=not in_brackets or rest[0].spaced):
        return None
    content = _read_tokens(rest)
    return None if _names_choice(content) else Choice(letter[0].text, content)


def _continues(token: Token, spaced_bracket: bool) -> bool:
    """Whether what follows a letter in brackets goes on with an expression or a list, so that it is no choice."""
    if token.kind is Kind.MARK and token.text in ("(", "["):
        return not spaced_bracket
    return token.text in (*"^_=+'!|,:;)", "and", "or", "\\\\", "\\quad", "cup", "cap", "in")


def _names_choice(answer: Answer) -> bool:
    """Whether an answer names a choice anywhere: two letters are no choice."""
    if isinstance(answer, Sequence):
        return any(map(_names_choice, answer.items))
    return isinstance(answer, Choice) or (isinstance(answer, Value) and answer.node in _CHOICE_SYMBOLS)


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
    union = any(is_word(sign, "or") or is_command(sign, "lor") or spell((sign,)) == "or" for sign in separators)
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
        if not (isinstance(answer, Relation) and answer.signs == ("in",) and _is_number_set(answer.sides[1])):
            kept.append(answer)
    return kept


def _is_number_set(answer: Answer) -> bool:
    return isinstance(answer, Unread) and answer.spelling.startswith("\\mathbb")


# Items of a list


def _read_item(items: Items) -> Answer:
    """One part of a list: words, a relation, a ratio, or what can be a side of a relation."""
    items = _unwrapped(items)
    if any(_is_separator(item) for item in items):
        return _read_list(items)
    while items and is_mark(items[0], "=") or items and is_command(items[0], "approx"):
        items = items[1:]
    while items and is_mark(items[-1], ".", ":"):
        items = items[:-1]
    words = text_of(items)
    if words is not None:
        return words
    sides, signs = split(items, _is_relation_sign)
    if signs:
        if len(sides) == 2 and not sides[1]:
            raise AnswerError("a relation without a right side")
        names = tuple(spell((sign,)) for sign in signs)
        return Relation(tuple(map(_read_side, sides)), names)
    terms, colons = split(items, lambda item: is_mark(item, ":"))
    if colons:
        return _read_ratio(terms)
    return _read_side(items)


def _is_relation_sign(item: Item) -> bool:
    return is_mark(item, "=", "<", ">") or is_command(item, *_SIGNS)


def _read_ratio(terms: list[Items]) -> Answer:
    """A ratio, or a time of day; a label before a colon is left out."""
    if len(terms) == 2 and not any(_has_number(item) for item in terms[0]) and any(is_word(item) for item in terms[0]):
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
    words = text_of(items)
    return words if words is not None else _read_value(items)


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
    is_system = all(len(row) == 1 for row in rows) and (environment.endswith("cases") or environment == "array")
    if is_system and any(isinstance(row[0], Relation) for row in rows):
        return Sequence(tuple(row[0] for row in rows))
    return Matrix(tuple(rows), "cases" if environment.endswith("cases") else environment[:1] + "matrix")


def _without_comma(items: Items) -> Items:
    return items[:-1] if items and is_mark(items[-1], ",", ".", ";") else items


# Values


def _read_value(items: Items) -> Answer:
    """An expression with its unit, or else the only number in a text; Unread if it is neither."""
    in_prose = _only_number(items) if is_word(items[0]) and len(items[0].text) > 1 else None  # type: ignore[union-attr]
    if in_prose is not None:
        return in_prose
    try:
        return _compound(items) or _measured(items)
    except AnswerError:
        return _only_number(items) or Unread(spell(items) if len(items) > 1 else _spelt(items[0]))


def _measured(items: Items) -> Value:
    number, unit, factor = split_unit(items)
    number, modulus = _without_modulus(number)
    node = parse_expression(number)
    if factor != 1:
        node = Apply("mul", (node, Number(factor)))
    return Value(node, modulus or unit)


def _compound(items: Items) -> Value | None:
    """The sum that 5 ft 3 in or 2 h 30 min is, in its first unit; None for a value with one unit or none."""
    starts = [index for index, item in enumerate(items) if isinstance(item, Token) and item.kind is Kind.NUMBER]
    if len(starts) < 2 or starts[0] != 0 or not any(map(is_word, items)):
        return None
    ends = [*starts[1:], len(items)]
    parts = [split_unit(items[start:end]) for start, end in zip(starts, ends, strict=True)]
    units = [part.unit for part in parts]
    first = units[0]
    if first is None or not first.powers or any(len(part.items) != 1 for part in parts):
        return None
    terms = []
    for part in parts:
        if part.unit is None or part.unit.powers != first.powers:
            return None
        terms.append(Apply("mul", (parse_expression(part.items), Number(part.unit.size / first.size))))
    return Value(Apply("add", tuple(terms)), first)


def _spelt(item: Item) -> str:
    return f"\\{item.text}" if isinstance(item, Token) and item.kind is Kind.COMMAND else spell((item,))


def _without_modulus(items: Items) -> tuple[Items, Unit | None]:
    """3 \\pmod{7} and 3 (mod 7): the number, and the modulus as its unit."""
    for index in range(1, len(items)):
        item = items[index]
        inner = item.items if is_group(item, "(") else items[index:]  # type: ignore[union-attr]  # a group
        if is_command(item, "pmod") or (inner and _is_mod(inner[0])):
            modulus = spell(items[index + 1 :] if is_command(item, "pmod") else inner[1:])
            return items[:index], Unit(((f"mod {modulus}", 1),))
    return items, None


def _is_mod(item: Item) -> bool:
    return isinstance(item, Token) and item.text == "mod" and item.kind is not Kind.COMMAND


def _only_number(items: Items) -> Answer | None:
    """The value that stands alone among words which do not change it; None if there is none, or more than one."""
    runs: list[list[Item]] = [[]]
    words = []
    for item in items:
        if isinstance(item, Token) and _is_prose(item):
            words.append(item.text)
            runs.append([])
        elif not is_mark(item, ".", "'", "!", "?", "-") or runs[-1]:
            runs[-1].append(item)
    runs = [run for run in runs if run]
    if not words or len(runs) != 1 or not leaves_number_alone(words) or not any(map(_has_number, runs[0])):
        return None
    try:
        return _measured(tuple(runs[0]))
    except AnswerError:
        return None


def _is_prose(item: Token) -> bool:
    return item.kind is Kind.WORD or (item.kind is Kind.LETTERS and (looks_like_word(item.text) or item.text in _LABELS))


def _has_number(item: Item) -> bool:
    if isinstance(item, Group):
        return any(map(_has_number, item.items))
    return item.kind is Kind.NUMBER
