"""Where a response states its answer: after the thinking, in the last \\boxed{...}, or in several that form a list."""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = r"[A-Za-z](?:_\{?\w+\}?)?"
_BARE_CONTENT = r"[+-]?\d+(?:[.,/]\d+)*|[+-]?\\[A-Za-z]+(?:\s*\{(?:[^{}]|\{[^{}]{0,80}\}){0,80}\}){0,2}|[A-Za-z]"
_BOX = r"\\(?:boxed|fbox)(?![A-Za-z])"
_TOKEN = re.compile(rf"{_BOX}\s*(?:(?P<open>\{{)|(?P<bare>{_BARE_CONTENT}))|\\.|[{{}}]", re.DOTALL)
_BEFORE_FIRST = re.compile(rf"({_NAME})\s*=\s*\$*\s*$")
_BETWEEN = re.compile(
    rf"[\s$.,;&)]*(?P<link>[,;]|\\\\|\\q?quad|\\text\{{[\s,]*(?:and|or)\s*\}}|\b(?:and|or)\b|(?={_NAME}\s*=))"
    rf"[\s$,;&(]*(?:\\q?quad)?[\s$]*(?:(?P<name>{_NAME})\s*=)?[\s$(]*"
)
_LONGEST_LINK = 60


class Box(NamedTuple):
    """One box: where its command begins, and where its content begins and ends."""

    start: int
    begin: int
    end: int


def final_text(response: str) -> str:
    """The part after the last </think>, or all of it if there is none; "" when the thinking never
    ended.

    Thinking is unfinished if a <think> follows the last </think>. A chat template that opens
    <think> in the prompt leaves no trace of it in the response, so a response without tags counts
    as a whole.
    """
    text = response.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def boxes(text: str) -> list[Box]:
    """All boxes whose braces balance, in order; of two nested ones the inner. \\boxed 5 and
    \\fbox{5} are boxes too.

    One pass over the text, whatever its braces: a hostile response costs time linear in its length.
    """
    found: list[Box] = []
    start = min((at for at in (text.find("\\boxed"), text.find("\\fbox")) if at >= 0), default=-1)
    if start < 0:
        return found
    open_groups: list[
        tuple[int, int] | None
    ] = []  # the start and begin of an open box; None for a plain brace
    last_start = -1
    for token in _TOKEN.finditer(text, start):
        kind = token.lastgroup
        if kind == "open":
            open_groups.append((token.start(), token.end()))
        elif kind == "bare":
            last_start = token.start()
            found.append(Box(last_start, token.start("bare"), token.end()))
        elif text[token.start()] == "{":
            open_groups.append(None)
        elif text[token.start()] == "}" and open_groups:
            opened = open_groups.pop()
            if opened is not None and opened[0] > last_start:
                last_start = opened[0]
                found.append(Box(*opened, token.start()))
    return found


def last_boxed(text: str) -> str | None:
    """The content of the last box, or None if there is none."""
    found = boxes(text)
    return text[found[-1].begin : found[-1].end] if found else None


def boxed_answer(text: str) -> str | None:
    """The content of the last box, or a list of the contents of the last ones, if they are listed.

    Boxes are listed when nothing but "and", "or", a comma, a line break or a name such as "y ="
    stands between them: "x = \\boxed{1}, y = \\boxed{2}" answers "x = 1, y = 2". None without a
    box.
    """
    found = boxes(text)
    if not found:
        return None
    listed, names = [found[-1]], [""]
    for box in reversed(found[:-1]):
        link = _link(text, box.end, listed[-1].start)
        if link is None:
            break
        names[-1] = link["name"] or ""
        listed.append(box)
        names.append("")
    first_name = _BEFORE_FIRST.search(
        text, max(listed[-1].start - _LONGEST_LINK, 0), listed[-1].start
    )
    names[-1] = first_name[1] if first_name else ""
    contents = [text[box.begin : box.end] for box in reversed(listed)]
    if len(set(contents)) == 1:
        return contents[0]
    named = all(names)
    return ", ".join(
        f"{name}={content}" if named else content
        for name, content in zip(reversed(names), contents, strict=True)
    )


def all_boxed(text: str) -> list[str]:
    """The contents of all boxes."""
    return [text[box.begin : box.end] for box in boxes(text)]


def _link(text: str, end: int, start: int) -> re.Match[str] | None:
    """What stands between the end of one box's content and the next box, if it makes a list of them."""
    if start - end > _LONGEST_LINK:
        return None
    closed = end + text.startswith("}", end)
    return _BETWEEN.fullmatch(text, closed, start)
