"""Ground truths of six real benchmarks, in the types they have in the field, against real verifier processes.

Every ground truth of all six files (1,120 rows) and of GSM8K, boxed, scores 1. With its first digit changed, or with 1
added to it, it scores 0; the one exception is a digit in the condition after an answer ("where n > 2").
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
    assert [
        text for text, verdict in zip(texts, verdicts, strict=True) if verdict.reward != 1.0
    ] == []


@pytest.mark.parametrize("name", GROUND_TRUTHS)
def test_every_perturbed_ground_truth_verifies_as_wrong(verifier: VerifierPool, name: str) -> None:
    texts, truths = zip(*questions(name), strict=True)
    verdicts = verifier.verify([f"Thus \\boxed{{{perturbed(text)}}}." for text in texts], truths)
    assert [
        text for text, verdict in zip(texts, verdicts, strict=True) if verdict.reward != 0.0
    ] == []
