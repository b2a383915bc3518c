"""Ground truths of six real benchmarks, in the types they have in the field, against real verifier processes.

Every ground truth of all six files (1,120 rows), boxed, scores 1. A perturbed one scores 0 except where
math-verify is lenient, all of it in olympiad: N=n (it folds case, so N=n+... is an identity), and an interval with
something stuck to it, such as (-1/2, 7/2)+1, whose members it takes for the answer.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spiral_mega.rewards import Verifier, normalize_answer

GROUND_TRUTHS = json.loads((Path(__file__).parent / "data" / "ground_truths.json").read_text())


def perturbed(text: str) -> str:
    """`text` with its first digit changed, or with 1 added when it has none."""
    return (
        re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), text, count=1)
        if re.search(r"\d", text)
        else text + "+1"
    )


def questions(name: str) -> list[tuple[str, Any]]:
    return [(text, truth) for truth in GROUND_TRUTHS[name] for text in normalize_answer(truth)]


@pytest.mark.parametrize("name", GROUND_TRUTHS)
def test_every_ground_truth_verifies_as_right(verifier: Verifier, name: str) -> None:
    texts, truths = zip(*questions(name), strict=True)
    verdicts = verifier.verify([f"Thus \\boxed{{{text}}}." for text in texts], truths)
    assert [text for text, verdict in zip(texts, verdicts, strict=True) if verdict.reward != 1.0] == []


@pytest.mark.parametrize("name", GROUND_TRUTHS)
def test_every_perturbed_ground_truth_verifies_as_wrong(verifier: Verifier, name: str) -> None:
    texts, truths = zip(*questions(name), strict=True)
    verdicts = verifier.verify([f"Thus \\boxed{{{perturbed(text)}}}." for text in texts], truths)
    assert [text for text, verdict in zip(texts, verdicts, strict=True) if verdict.reward != 0.0] == []
