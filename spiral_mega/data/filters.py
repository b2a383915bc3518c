"""Leaving out problems whose prompt is too long. A prompt is never cut: a cut problem is another problem."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from spiral_mega.data.errors import DataError
from spiral_mega.traces import Problem

logger = logging.getLogger(__name__)


def filter_overlong(
    problems: Sequence[Problem], prompt: Callable[[Problem], list[int]], max_prompt_tokens: int
) -> tuple[list[Problem], int]:
    """The problems whose prompt has at most `max_prompt_tokens` tokens, in order, and how many were left out.

    `prompt` gives a problem's tokens, as `Prompter.search_prompt` does. Raises DataError when none is left.
    """
    lengths = [len(prompt(problem)) for problem in problems]
    if 0 in lengths:
        raise DataError(
            f"the prompt of problem {problems[lengths.index(0)].id!r} has no tokens: the tokenizer is empty, or its "
            "chat template drops the messages; check model.tokenizer"
        )
    kept = [problem for problem, length in zip(problems, lengths, strict=True) if length <= max_prompt_tokens]
    if not kept:
        shortest = f"the shortest prompt has {min(lengths)} tokens" if lengths else "there were none to begin with"
        raise DataError(
            f"data.max_prompt_tokens is {max_prompt_tokens}, which leaves none of {len(lengths)} problems "
            f"({shortest}): raise data.max_prompt_tokens, or check prompts and data"
        )
    left_out = len(problems) - len(kept)
    logger.info("%d of %d problems left out: prompt above %d tokens", left_out, len(problems), max_prompt_tokens)
    return kept, left_out
