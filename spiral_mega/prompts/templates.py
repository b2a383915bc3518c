"""The built-in texts of prompts, and how a template is checked and filled.

A template is literal text with {placeholders}; {{word}} stands for the text {word}, and other
braces, as LaTeX has them, mean nothing. `PromptsConfig` replaces any of the templates below.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from spiral_mega.errors import UserError

# By verifier. Others have none, as only their author knows how their answers are read.
INSTRUCTIONS = {"math": "Reason step by step, and put your final answer in \\boxed{}."}

AGGREGATION = """\
Below are a problem and several candidate solutions, each written without sight of the others. Any of them may be \
wrong, incomplete or cut off, and several that agree may share one mistake.

Problem:
{problem}

{traces}

Audit these candidates first: follow their reasoning step by step, find where they part ways, and tell the ideas that \
hold from those that fail. Then build one correct and complete solution out of the sound ideas, closing the gaps they \
leave. If you see that no candidate is promising, say so and make a fresh attempt instead of recombining them. \
Answer in the form that the problem asks for."""

TRACE = "Candidate {number}:\n{trace}"
UNFINISHED = "Candidate {number} (unfinished: it reached the length limit before its end):\n{trace}"
TRACE_SEPARATOR = "\n\n"
OMITTED = "[...]"  # replaces text of a trace that a view leaves out

PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")


class Span(NamedTuple):
    """A piece of a message; `trusted` if it may form control tokens, as data and traces must not."""

    text: str
    trusted: bool


def checked_template(
    key: str, text: str, required: set[str], optional: Collection[str] = ()
) -> str:
    """Return the template `text` of prompts.`key`.

    Raises UserError if it lacks a required placeholder or has one that is neither required nor
    optional.
    """
    names = {match[2] for match in PLACEHOLDER.finditer(text) if match[2]}
    for name in sorted(required - names):
        raise UserError(
            f"prompts.{key} is {text!r}, without {{{name}}}: put {{{name}}} where it belongs"
        )
    known = required | set(optional)
    for name in sorted(names - known):
        raise UserError(
            f"prompts.{key} is {text!r}, and {{{name}}} is none of its placeholders "
            f"({', '.join(sorted(known))}): correct it, or write {{{{{name}}}}} for the text "
            f"{{{name}}}"
        )
    return text


def fill(template: str, **values: Sequence[Span]) -> list[Span]:
    """Return the template's spans with `values` in place of placeholders.

    Filled in one pass: braces in values mean nothing.
    """
    spans: list[Span] = []
    position = 0
    for match in PLACEHOLDER.finditer(template):
        literal_word, placeholder = match[1], match[2]
        spans.append(Span(template[position : match.start()], trusted=True))
        if literal_word:
            spans.append(Span(f"{{{literal_word}}}", trusted=True))
        else:
            spans += values[placeholder]
        position = match.end()
    spans.append(Span(template[position:], trusted=True))
    return spans
