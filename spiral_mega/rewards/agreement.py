"""Do two responses give the same answer? The verifier's own equivalence, without a ground truth.

Each verifier module has beside `score` one or two more functions, which a user's module may have too:

    answer_of(response) -> str | None      the answer in plain spelling, None if the response gives none
    agree(response, answers) -> float      where spelling does not decide: 1.0 if its answer is the same as any of
                                           `answers` (as `answer_of` gives them), and 0.0 otherwise

A module without `answer_of` is read as kind `exact` reads: the last boxed answer, or else the whole final text.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType

from spiral_mega.rewards.registry import BUILT_IN
from spiral_mega.rewards.verifier import VerifierPool

Groups = list[int | None]


def group_answers(responses: Sequence[str], kind: str, verifier: VerifierPool) -> Groups:
    """The group [N] of each response's answer, numbered from 0 in order of first appearance; None without an answer.

    Answers that are spelt alike are one; a further spelling joins the first group whose first answer it agrees with.
    (Symbolic equality with rounding is not transitive, so some rule is needed; this one depends on nothing but the
    order of the responses.) Comparisons run in the verifier's processes; one that fails or takes too long counts as
    different.
    """
    module, answer_of = _module(kind), load_answer_of(kind)
    answers = [answer_of(response) for response in responses]
    first: dict[str, str] = {}  # a response for each answer
    for answer, response in zip(answers, responses, strict=True):
        if answer is not None:
            first.setdefault(answer, response)
    groups: dict[str, int] = {}
    leaders: list[str] = []
    for answer, response in first.items():
        found = _first_that_agrees(response, leaders, f"{module.__name__}:agree", verifier) if _judges(module) else None
        groups[answer] = len(leaders) if found is None else found
        if found is None:
            leaders.append(answer)
    return [None if answer is None else groups[answer] for answer in answers]


def load_answer_of(kind: str) -> Callable[[str], str | None]:
    """The function that reads an answer off a response of this kind."""
    answer_of: Callable[[str], str | None] = _module(kind).answer_of
    return answer_of


def _first_that_agrees(response: str, answers: Sequence[str], agree: str, verifier: VerifierPool) -> int | None:
    """The index of the first of `answers` that the response agrees with; all are asked for at once before each is."""
    if not answers:
        return None
    verdict = verifier.submit(response, tuple(answers), agree).result()
    if verdict.status == "ok" and verdict.reward < 1.0:
        return None
    asked = [verifier.submit(response, (answer,), agree) for answer in answers]
    same = [future.result().reward >= 1.0 for future in asked]
    return same.index(True) if True in same else None


def _module(kind: str) -> ModuleType:
    """The module that knows the answers of `kind`."""
    module = importlib.import_module(BUILT_IN.get(kind, kind).partition(":")[0])
    return module if hasattr(module, "answer_of") else importlib.import_module("spiral_mega.rewards.text_answer")


def _judges(module: ModuleType) -> bool:
    return hasattr(module, "agree")
