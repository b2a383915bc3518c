"""Where a response states its answer: after the thinking, in the last \\boxed{...}."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def final_text(response: str) -> str:
    """The part after the last </think>, or all of it if there is none; "" when the thinking never ended.

    Thinking is unfinished if a <think> follows the last </think>. A chat template that opens <think> in the prompt
    leaves no trace of it in the response, so a response without tags counts as a whole.
    """
    text = response.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} whose braces balance (the inner one of two nested), or None.

    One pass over the text, whatever its braces: a hostile response costs time linear in its length.
    """
    start = text.find("\\boxed")
    if start < 0:
        return None
    open_groups: list[int] = []  # where a box's content begins; -1 for a plain brace
    begin, end = -1, -1
    for token in _TOKEN.finditer(text, start):
        if token[0].startswith("\\boxed"):
            open_groups.append(token.end())
        elif token[0] == "{":
            open_groups.append(-1)
        elif token[0] == "}" and open_groups:
            opened = open_groups.pop()
            if opened > begin:
                begin, end = opened, token.start()
    return text[begin:end] if begin >= 0 else None
