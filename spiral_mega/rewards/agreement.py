"""Whether two responses give the same answer: the verifier's own equivalence, without a ground
truth.

Next to `score`, a verifier module has one or two more functions, which a user's module may have
too:

    answer_of(response) -> str | None   the answer in plain spelling, None if the response gives none
    agree(response, answers) -> float   where spelling does not decide: 1.0 if its answer is the same as
                                        any of `answers` (as `answer_of` gives them), and 0.0 otherwise

A module without `answer_of` is read as `exact` reads: the last boxed answer, or else the whole
final text.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType

from spiral_mega.rewards.registry import BUILT_IN
from spiral_mega.rewards.verifier import VerifierPool

Groups = list[int | None]


def group_answers(responses: Sequence[str], verifier: str, pool: VerifierPool) -> Groups:
    """Return the group [N] of each response's answer, numbered in order of first appearance; None
    without an answer.

    Answers that are spelt alike are one. A further spelling joins the first group whose first
    answer it agrees with: agreement is not transitive (62.5 % agrees with 62.5 and with 0.625), so
    some rule is needed, and this one depends on nothing but the order of the responses. Comparisons
    run in the processes of `pool`; one that fails or takes too long counts as different.
    """
    module, answer_of = _module(verifier), load_answer_of(verifier)
    answers = [answer_of(response) for response in responses]
    first: dict[str, str] = {}  # a response for each answer
    for answer, response in zip(answers, responses, strict=True):
        if answer is not None:
            first.setdefault(answer, response)
    groups: dict[str, int] = {}
    leaders: list[str] = []
    for answer, response in first.items():
        found = None
        if hasattr(module, "agree"):
            found = _first_that_agrees(response, leaders, f"{module.__name__}:agree", pool)
        groups[answer] = len(leaders) if found is None else found
        if found is None:
            leaders.append(answer)
    return [None if answer is None else groups[answer] for answer in answers]


def load_answer_of(verifier: str) -> Callable[[str], str | None]:
    """Return the function that reads an answer off a response for this verifier."""
    answer_of: Callable[[str], str | None] = _module(verifier).answer_of
    return answer_of


def _first_that_agrees(
    response: str, answers: Sequence[str], agree: str, pool: VerifierPool
) -> int | None:
    """Return the index of the first of `answers` that the response agrees with.

    One comparison with all of them comes first: most responses agree with none.
    """
    if not answers:
        return None
    verdict = pool.submit(response, tuple(answers), agree).result()
    if verdict.status == "ok" and verdict.reward < 1.0:
        return None
    futures = [pool.submit(response, (answer,), agree) for answer in answers]
    same = [future.result().reward >= 1.0 for future in futures]
    return same.index(True) if True in same else None


def _module(verifier: str) -> ModuleType:
    """Return the module that can read the answers of a verifier."""
    module = importlib.import_module(BUILT_IN.get(verifier, verifier).partition(":")[0])
    if hasattr(module, "answer_of"):
        return module
    return importlib.import_module("spiral_mega.rewards.text_answer")
