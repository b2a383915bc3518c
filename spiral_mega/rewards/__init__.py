"""Rewards: whether a response's answer is one of the problem's ground truths, verified in killable
processes.

Verifiers: `math` (last boxed answer, compared as mathematics), `exact` (text), `arithmetic` (number
paths), or the import path `package.module:function` of a function
(response: str, answer: tuple[str, ...]) -> float.
"""

from spiral_mega.rewards.agreement import group_answers
from spiral_mega.rewards.answers import normalize_answer
from spiral_mega.rewards.registry import check_verifier_name
from spiral_mega.rewards.verifier import Verdict, VerifierPool, verify

__all__ = [
    "Verdict",
    "VerifierPool",
    "check_verifier_name",
    "group_answers",
    "normalize_answer",
    "verify",
]
