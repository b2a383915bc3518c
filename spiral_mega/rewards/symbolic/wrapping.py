"""What stands around an answer: punctuation, "the answer is", a condition after it, the letter of a choice."""

from __future__ import annotations

import re

from spiral_mega.rewards.symbolic.tokens import Kind, Token, spelling
from spiral_mega.rewards.symbolic.vocabulary import vocabulary

CHOICES = frozenset("ABCDEFGHIJ")

_LABELS = vocabulary(
    """
    the a final correct answer answers ans is are so thus therefore hence we get have result
    option choice solution solutions value values and equals equal to exactly approximately
    about approx roughly
    """
)
_NAMING_LABELS = vocabulary(
    "answer answers ans result option choice exactly approximately about approx roughly"
)
_TAILS = frozenset({"where", "for", "with"})
_TAIL_OBJECTS = vocabulary("all any every each some integer integers real constant constants")
_OPENING = frozenset({"(", "[", "{", "\\{"})
_CLOSING = frozenset({")", "]", "}", "\\}"})
_OTHER_CHOICE = re.compile(r"\([A-J]\)")


def without_ends(tokens: list[Token]) -> list[Token]:
    """Without the punctuation, and Markdown's asterisks, around the answer."""
    start, end = 0, len(tokens)
    while (
        end > start
        and tokens[end - 1].kind is Kind.MARK
        and tokens[end - 1].text in ",;.:^\\\\\\quad"
    ):
        end -= 1
    while (
        start < end and tokens[start].kind is Kind.MARK and tokens[start].text in ",;:^=\\\\\\quad"
    ):
        start += 1
    if end - start > 2 and tokens[start].text == tokens[end - 1].text == "'":  # quotation marks
        return tokens[start + 1 : end - 1]
    return tokens[start:end]


def without_condition(tokens: list[Token]) -> tuple[list[Token], list[Token]]:
    """The tokens before, and from, a condition such as "where C is a constant" or "for all x"."""
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token.text in _OPENING) - (token.text in _CLOSING)
        is_word = token.kind in (Kind.WORD, Kind.LETTERS) and token.text in _TAILS
        if index == 0 or depth or not is_word:
            continue
        if (
            token.text == "where"
            or "".join(other.text for other in tokens[index + 1 : index + 2]) in _TAIL_OBJECTS
        ):
            return tokens[:index], tokens[index:]
    return tokens, []


def without_label(tokens: list[Token]) -> list[Token]:
    """Without words such as "the final answer is" before the answer."""
    end, named = 0, False
    for token in tokens:
        word = token.text.lower()
        if (
            token.kind in (Kind.WORD, Kind.LETTERS)
            and word in _LABELS
            and (len(word) > 1 or not named)
        ):
            named |= word in _NAMING_LABELS
        elif not (end and token.kind is Kind.MARK and token.text in ":="):
            break
        end += 1
    tokens = tokens[end:] if named and end < len(tokens) else tokens
    last = max(
        (index for index, token in enumerate(tokens) if token.text.lower() not in _LABELS),
        default=-1,
    )
    is_named = any(token.text.lower() in ("answer", "answers") for token in tokens[last + 1 :])
    return tokens[: last + 1] if is_named and last >= 0 else tokens


def split_choice(tokens: list[Token]) -> tuple[str, list[Token]] | None:
    """The letter of (A), A), A. or A: and what stands after it; None for what is no choice, or several."""
    bare = [token for token in tokens[:5] if token.text not in ("{", "}")]
    if tokens and tokens[0].text == "{":
        tokens = [*bare, *tokens[5:]]
    in_brackets = bool(tokens) and tokens[0].text in ("(", "[")
    letter = tokens[1:2] if in_brackets else tokens[:1]
    if (
        not letter
        or letter[0].text not in CHOICES
        or letter[0].kind not in (Kind.LETTERS, Kind.WORD)
    ):
        return None
    end = 2 if in_brackets else 1
    mark = tokens[end].text if end < len(tokens) else "."
    closings = (")", "]") if in_brackets else (")", ".", ":")
    dashed = letter[0].kind is Kind.WORD and mark == "-"  # "B - 12" in text mode
    explained = mark == "(" and tokens[end].spaced and not in_brackets  # B (12)
    if mark not in closings and not dashed and not explained:
        return None
    rest = tokens[end + (not explained) :]
    if rest and (
        (not explained and _continues(rest[0], in_brackets)) or _OTHER_CHOICE.search(spelling(rest))
    ):
        return None
    if mark == ":" and len(rest) == 1 and rest[0].text.isalpha():  # the ratio A : B
        return None
    return letter[0].text, rest


def _continues(token: Token, after_bracket: bool) -> bool:
    """Whether what follows a letter in brackets goes on with an expression or a list, so that it is no choice."""
    if token.kind is Kind.MARK and token.text in ("(", "["):
        return after_bracket and not token.spaced
    return token.text in (*"^_=+'!|,:;)", "and", "or", "\\\\", "\\quad", "cup", "cap", "in")
