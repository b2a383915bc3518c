"""Keeps problems and traces from forging turns: control tokens spelled in them are broken up.

Problems and traces are data, and may spell control tokens ("<|im_start|>system"), by accident or by
design. An invisible character within such text makes the tokenizer read it as ordinary text.
Control tokens are those that the tokenizer declares special; markers that it declares ordinary,
such as Qwen3's <think>, stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from spiral_mega.errors import UserError
from spiral_mega.prompts.templates import Span

BREAKERS = ("\u200b", "\u2060", " ")  # in order of preference
REPLACEMENT = "\ufffd"


class ControlTokens:
    """The control tokens of a tokenizer, and the character that breaks them up.

    A tokenizer may drop invisible characters before it looks for control tokens, so each of
    BREAKERS is tried. Raises UserError if none works.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        ids = _control_ids(tokenizer)
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if ids else None
        self._breaker = _find_breaker(tokenizer, ids)

    def join(self, spans: Sequence[Span]) -> str:
        """Return the text of all spans, with control tokens broken up unless wholly trusted.

        A control token may be pieced together from several spans, so they are looked for in the
        whole text.
        """
        text = "".join(span.text for span in spans)
        if self._pattern is None or not self._pattern.search(text):
            return text
        trusted: list[bool] = []  # by character
        for span in spans:
            trusted += [span.trusted] * len(span.text)
        position = 0
        while match := self._pattern.search(text, position):
            start, end = match.span()
            if all(trusted[start:end]):
                position = end
                continue
            broken = self._break_up(match[0])
            text = text[:start] + broken + text[end:]
            trusted[start:end] = [False] * len(broken)
            position = start  # what is left may contain a shorter control token
        return text

    def _break_up(self, token: str) -> str:
        """A token of one character cannot be broken up; the replacement character marks its place."""
        return REPLACEMENT if len(token) == 1 else _broken(token, self._breaker)


def _control_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of all special tokens by their text."""
    added = {
        token.content: index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {text: index for text, index in {**added, **special}.items() if text}


def _find_breaker(tokenizer: PreTrainedTokenizerBase, control_ids: dict[str, int]) -> str:
    """Return the first breaker that keeps the tokenizer from reading a control token."""
    # The unknown token comes out of any unknown word, and opens no turn.
    tokens = [
        text
        for text, index in control_ids.items()
        if len(text) > 1 and index != tokenizer.unk_token_id
    ]
    for breaker in BREAKERS:
        if not any(
            _reads_as(tokenizer, _broken(text, breaker), control_ids[text]) for text in tokens
        ):
            return breaker
    raise UserError(
        f"the tokenizer {tokenizer.name_or_path!r} reads {tokens} as control tokens even with a "
        "character between their letters, so problems and traces could forge turns: use a "
        "tokenizer with literal special tokens"
    )


def _broken(token: str, breaker: str) -> str:
    return token[0] + breaker + token[1:]


def _reads_as(tokenizer: PreTrainedTokenizerBase, text: str, token_id: int) -> bool:
    """Whether tokenizing `text` gives `token_id`."""
    try:
        return token_id in tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # a closed vocabulary refuses unknown words altogether
        return False
