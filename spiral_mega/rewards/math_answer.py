"""Verifier `math`: the boxed answer equals one of the ground truths as mathematics, whatever their spelling."""

from __future__ import annotations

from functools import lru_cache

from spiral_mega.rewards.latex import MAX_CHARS, hostile, tidy
from spiral_mega.rewards.response import all_boxed, boxed_answer, final_text
from spiral_mega.rewards.symbolic.answers import Sequence
from spiral_mega.rewards.symbolic.compare import same
from spiral_mega.rewards.symbolic.reader import Reading, read
from spiral_mega.rewards.symbolic.tokens import spell_out

_GSM8K_MARK = "####"
_CACHED_PAIRS = 4096


def score(response: str, answer: tuple[str, ...]) -> float:
    """Return 1.0 if the response's answer is any of `answer`, else 0.0 (also without a box in the
    final text).

    The answer is the last \\boxed{...} of the final text, or a list of boxes ("\\boxed{1} and
    \\boxed{2}"). Where a ground truth has several parts, as many boxes anywhere in the final text
    are its parts too.
    """
    final = final_text(response)
    given = _given(final)
    if given is None:
        return 0.0
    golds = [_gold(text) for text in answer]
    return float(any(_is_right(gold, given) or _is_right_in_parts(gold, final) for gold in golds))


def answer_of(response: str) -> str | None:
    """The boxed answer, tidied; None if there is none."""
    return _given(final_text(response))


def agree(response: str, answers: tuple[str, ...]) -> float:
    """Return 1.0 if the response's answer equals any of `answers` when either of the two is the ground truth."""
    given = answer_of(response)
    if given is None or hostile(given) is not None:
        return 0.0
    return float(
        any(hostile(a) is None and (_is_right(a, given) or _is_right(given, a)) for a in answers)
    )


def _given(final: str) -> str | None:
    content = boxed_answer(final)
    return (tidy(content) if content is not None else None) or None


def _gold(text: str) -> str:
    """A ground truth without what data files write around it: a worked solution before ####, or a box."""
    text = text.rpartition(_GSM8K_MARK)[2]
    return boxed_answer(text) or text


def _is_right(gold: str, given: str) -> bool:
    if len(gold) > MAX_CHARS or len(given) > MAX_CHARS:
        return gold == given
    return _is_right_cached(gold, given)


@lru_cache(maxsize=_CACHED_PAIRS)
def _is_right_cached(gold: str, given: str) -> bool:
    if spell_out(gold) == spell_out(given):
        return True
    gold_reading, given_reading = _read(gold), _read(given)
    if gold_reading is None or given_reading is None:
        return False
    if (
        gold_reading.condition
        and given_reading.condition
        and gold_reading.condition != given_reading.condition
    ):
        return False
    pairs = [(right, answer) for right in gold_reading.answers for answer in given_reading.answers]
    return any(same(right, answer) for right, answer in pairs)


def _read(text: str) -> Reading | None:
    """What a text may mean; None for a hostile one, which is compared by its spelling alone."""
    return read(text) if hostile(tidy(text)) is None else None


def _is_right_in_parts(gold: str, final: str) -> bool:
    """Whether the parts of a ground truth stand in boxes of their own."""
    reading = _read(gold)
    if reading is None or not any(isinstance(answer, Sequence) for answer in reading.answers):
        return False
    contents = all_boxed(final)
    counts = {len(answer.items) for answer in reading.answers if isinstance(answer, Sequence)}
    return (
        len(contents) > 1 and len(contents) in counts and _is_right(gold, tidy(", ".join(contents)))
    )
