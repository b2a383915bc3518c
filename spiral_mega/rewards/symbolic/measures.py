"""A number or an expression with its unit, and the only number in a text."""

from __future__ import annotations

from spiral_mega.rewards.symbolic.answers import Answer, Unread, Value
from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.expressions import parse_expression
from spiral_mega.rewards.symbolic.groups import (
    Group,
    Item,
    Items,
    is_command,
    is_group,
    is_mark,
    is_word,
    spell,
)
from spiral_mega.rewards.symbolic.nodes import Apply, Number
from spiral_mega.rewards.symbolic.tokens import Kind, Token
from spiral_mega.rewards.symbolic.unit_table import Unit, base_unit
from spiral_mega.rewards.symbolic.units import split_unit
from spiral_mega.rewards.symbolic.words import is_long_word, is_prose, leaves_number_alone


def read_value(items: Items) -> Answer:
    """An expression with its unit, or else the only number in a text; Unread if it is neither."""
    in_prose = _only_number(items) if is_long_word(items[0]) else None
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
    starts = [
        index
        for index, item in enumerate(items)
        if isinstance(item, Token) and item.kind is Kind.NUMBER
    ]
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
        terms.append(
            Apply("mul", (parse_expression(part.items), Number(part.unit.size / first.size)))
        )
    return Value(Apply("add", tuple(terms)), first)


def _spelt(item: Item) -> str:
    return (
        f"\\{item.text}"
        if isinstance(item, Token) and item.kind is Kind.COMMAND
        else spell((item,))
    )


def _without_modulus(items: Items) -> tuple[Items, Unit | None]:
    """3 \\pmod{7} and 3 (mod 7): the number, and the modulus as its unit."""
    for index in range(1, len(items)):
        item = items[index]
        inner = item.items if is_group(item, "(") else items[index:]  # type: ignore[union-attr]  # a group
        if is_command(item, "pmod") or (inner and _is_mod(inner[0])):
            modulus = spell(items[index + 1 :] if is_command(item, "pmod") else inner[1:])
            return items[:index], base_unit(f"mod {modulus}")
    return items, None


def _is_mod(item: Item) -> bool:
    return isinstance(item, Token) and item.text == "mod" and item.kind is not Kind.COMMAND


def _only_number(items: Items) -> Answer | None:
    """The value that stands alone among words which do not change it; None if there is none, or more than one."""
    runs: list[list[Item]] = [[]]
    words = []
    for item in items:
        if isinstance(item, Token) and is_prose(item):
            words.append(item.text)
            runs.append([])
        elif not is_mark(item, ".", "'", "!", "?", "-") or runs[-1]:
            runs[-1].append(item)
    runs = [run for run in runs if run]
    if (
        not words
        or len(runs) != 1
        or not leaves_number_alone(words)
        or not any(map(has_number, runs[0]))
    ):
        return None
    try:
        return _measured(tuple(runs[0]))
    except AnswerError:
        return None


def has_number(item: Item) -> bool:
    if isinstance(item, Group):
        return any(map(has_number, item.items))
    return item.kind is Kind.NUMBER
