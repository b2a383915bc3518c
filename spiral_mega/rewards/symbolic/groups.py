"""Tokens grouped by their brackets, braces and environments, and split at signs outside of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from spiral_mega.rewards.symbolic.errors import AnswerError
from spiral_mega.rewards.symbolic.tokens import Kind, Token


class Group(NamedTuple):
    """What stands between two brackets. An environment's `opening` is its name."""

    opening: str
    closing: str
    items: tuple[Item, ...]


Item = Token | Group
Items = tuple[Item, ...]

_ROUND_OR_SQUARE = frozenset({")", "]"})
_CLOSINGS = {
    "(": _ROUND_OR_SQUARE,
    "[": _ROUND_OR_SQUARE,
    "{": frozenset({"}"}),
    "\\{": frozenset({"\\}"}),
    "langle": frozenset({"rangle"}),
    "lfloor": frozenset({"rfloor"}),
    "lceil": frozenset({"rceil"}),
    "lvert": frozenset({"rvert"}),
    "lVert": frozenset({"rVert"}),
}
_ALL_CLOSINGS = frozenset[str]().union(*_CLOSINGS.values())
_BRACKET_KINDS = (Kind.MARK, Kind.COMMAND)


class _Open(NamedTuple):
    opening: str
    closings: frozenset[str]
    items: list[Item]


def group(tokens: Sequence[Token]) -> Items:
    """Group tokens by their brackets. Raises AnswerError when these do not match; ( may be closed by ]."""
    tokens = _reversed_interval(tokens)
    stack = [_Open("", frozenset(), [])]
    for token in tokens:
        if token.kind is Kind.BEGIN:
            stack.append(_Open(token.text, frozenset({token.text}), []))
        elif token.kind in _BRACKET_KINDS and token.text in _CLOSINGS:
            stack.append(_Open(token.text, _CLOSINGS[token.text], []))
        elif token.kind is Kind.END or (
            token.kind in _BRACKET_KINDS and token.text in _ALL_CLOSINGS
        ):
            _close(stack, token)
        else:
            stack[-1].items.append(token)
    if len(stack) > 1:
        raise AnswerError(f"{stack[-1].opening} is not closed")
    return tuple(stack[0].items)


def split(items: Items, is_separator: Callable[[Item], bool]) -> tuple[list[Items], list[Item]]:
    """Split at separators: the parts between them (some may be empty), and the separators."""
    parts: list[list[Item]] = [[]]
    separators: list[Item] = []
    for item in items:
        if is_separator(item):
            separators.append(item)
            parts.append([])
        else:
            parts[-1].append(item)
    return [tuple(part) for part in parts], separators


def is_mark(item: Item | None, *marks: str) -> bool:
    """Whether an item is one of these marks."""
    return isinstance(item, Token) and item.kind is Kind.MARK and item.text in marks


def is_command(item: Item | None, *names: str) -> bool:
    """Whether an item is one of these commands."""
    return isinstance(item, Token) and item.kind is Kind.COMMAND and item.text in names


def is_word(item: Item | None, *words: str) -> bool:
    """Whether an item is one of these words, in lower case; any word if none are given."""
    return (
        isinstance(item, Token)
        and item.kind is Kind.WORD
        and (not words or item.text.lower() in words)
    )


def is_group(item: Item | None, *openings: str) -> bool:
    """Whether an item is a group that begins so; any group if no opening is given."""
    return isinstance(item, Group) and (not openings or item.opening in openings)


def spell(items: Items) -> str:
    """Spell items out without spaces and without braces."""
    parts = []
    for item in items:
        if isinstance(item, Token):
            parts.append(item.text)
        elif item.opening == "{":
            parts.append(spell(item.items))
        else:
            parts.append(item.opening + spell(item.items) + item.closing)
    return "".join(parts)


def _close(stack: list[_Open], token: Token) -> None:
    opened = stack[-1]
    if len(stack) == 1 or token.text not in opened.closings:
        raise AnswerError(f"{token.text} closes nothing")
    stack.pop()
    contents = tuple(opened.items)
    lone_sign = (
        len(contents) == 1 and isinstance(contents[0], Token) and contents[0].kind is Kind.MARK
    )
    if opened.opening == "{" and lone_sign:  # {=} and {+} are spaced signs
        stack[-1].items.extend(contents)
    else:
        stack[-1].items.append(Group(opened.opening, token.text, contents))


def _reversed_interval(tokens: Sequence[Token]) -> Sequence[Token]:
    """Write ]a,b[ (an open interval, as in French) as (a,b); also ]a,b] and [a,b[."""
    if len(tokens) < 5 or tokens[0].text not in "[]" or tokens[-1].text not in "[]":
        return tokens
    first, last = tokens[0], tokens[-1]
    if (first.text, last.text) == ("[", "]") or any(
        token.text in ("[", "]") for token in tokens[1:-1]
    ):
        return tokens
    opening = first._replace(text="(" if first.text == "]" else "[")
    closing = last._replace(text=")" if last.text == "[" else "]")
    return [opening, *tokens[1:-1], closing]
