"""Do two responses give the same answer? The verifier's own equivalence, without a ground truth.

Each verifier module has beside `score` two functions, which a user's module may have too:

    answer_of(response) -> str | None      the answer as written, None if the response gives none
    agree(response, answers) -> float      1.0 if its answer is the same as any of `answers` (as `answer_of` gives them)

A module without them is read as kind `exact` reads: the last boxed answer, or else the whole final text.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from spiral_mega.rewards.kinds import BUILT_IN
from spiral_mega.rewards.verifier import Verdict, Verifier

Groups = list[int | None]


def group_answers(responses: Sequence[str], kind: str, verifier: Verifier) -> Groups:
    """The group [N] of each response's answer, numbered from 0 in order of first appearance; None without an answer.

    Answers that are spelt alike are one; each further spelling joins the first group whose first answer the verifier
    says it is the same as, in either direction. (Symbolic equality with rounding is not transitive, so some rule is
    needed; this one depends on nothing but the order of the responses.) Comparisons run in the verifier's processes;
    one that fails or takes too long counts as different.
    """
    answer_of, agree = load_answer_of(kind), agreement_kind(kind)
    answers = [answer_of(response) for response in responses]
    first = {answer: response for response, answer in reversed(list(zip(responses, answers, strict=True)))}
    groups: dict[str, int] = {}
    leaders: list[str] = []
    for answer in dict.fromkeys(each for each in answers if each is not None):
        asked: list[tuple[Future[Verdict], Future[Verdict]]] = [
            (verifier.submit(first[answer], (leader,), agree), verifier.submit(first[leader], (answer,), agree))
            for leader in leaders
        ]
        same = [max(there.result().reward, back.result().reward) >= 1.0 for there, back in asked]
        groups[answer] = same.index(True) if True in same else len(leaders)
        if groups[answer] == len(leaders):
            leaders.append(answer)
    return [None if answer is None else groups[answer] for answer in answers]


def load_answer_of(kind: str) -> Callable[[str], str | None]:
    """The function that reads an answer off a response of this kind."""
    return getattr(importlib.import_module(_module(kind)), "answer_of")  # noqa: B009


def agreement_kind(kind: str) -> str:
    """The kind whose verdict on (response, answers) tells whether the response's answer is the same as one of them."""
    return f"{_module(kind)}:agree"


def _module(kind: str) -> str:
    """The module that knows the answers of `kind`."""
    name = BUILT_IN.get(kind, kind).partition(":")[0]
    module = importlib.import_module(name)
    if hasattr(module, "answer_of") != hasattr(module, "agree"):
        raise ValueError(f"the module of kind {kind!r} has only one of answer_of and agree: define both, or neither")
    return name if hasattr(module, "agree") else "spiral_mega.rewards.text_answer"
