"""Ground truths of six real benchmarks, in the types they have in the field, against real verifier processes.

Every ground truth of all six files (1,120 rows), boxed, scores 1; with its first digit changed it scores 0. The one
exception is $N=n$ in olympiad, which has no digit and for which N=n+1 scores 1: math-verify folds case, so that
the ground truth is an identity. It also reads an interval with something stuck to it, (-1/2, 7/2)+1, as its two ends.
A wrong answer that is an equation may cost the time limit (3 of Minerva's 347 at 5 s): it scores 0 all the same.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spiral_mega.rewards import VerifierPool, normalize_answer

GROUND_TRUTHS = json.loads((Path(__file__).parent / "data" / "ground_truths.json").read_text())


def perturbed(text: str) -> str:
    """`text` with its first digit changed, or with 1 added when it has none."""
    changed = re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), text, count=1)
    return changed if changed != text else text + "+1"


def questions(name: str) -> list[tuple[str, Any]]:
    return [(text, truth) for truth in GROUND_TRUTHS[name] for text in normalize_answer(truth)]


@pytest.mark.parametrize("name", GROUND_TRUTHS)
def test_every_ground_truth_verifies_as_right(verifier: VerifierPool, name: str) -> None:
    texts, truths = zip(*questions(name), strict=True)
    verdicts = verifier.verify([f"Thus \\boxed{{{text}}}." for text in texts], truths)
    assert [text for text, verdict in zip(texts, verdicts, strict=True) if verdict.reward != 1.0] == []


@pytest.mark.parametrize("name", GROUND_TRUTHS)
def test_every_perturbed_ground_truth_verifies_as_wrong(verifier: VerifierPool, name: str) -> None:
    texts, truths = zip(*questions(name), strict=True)
    verdicts = verifier.verify([f"Thus \\boxed{{{perturbed(text)}}}." for text in texts], truths)
    assert [text for text, verdict in zip(texts, verdicts, strict=True) if verdict.reward != 0.0] == []
