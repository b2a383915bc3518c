"""Answers that were marked by hand: no wrong one is paid, and no right one refused.

marked_answers.json is a sample of answers as models give them; own_answers.json has more of each kind, written to be
mistaken: answers that a verifier pays for too little, and honest answers in an unusual form.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.verifier import golds_of
from spiral_mega.rewards import VerifierPool
from spiral_mega.rewards.math_answer import agree, score

DATA = Path(__file__).parent / "data"
FILES = ("marked_answers.json", "own_answers.json")


def load(name: str) -> list[dict[str, Any]]:
    return json.loads((DATA / name).read_text())


@pytest.mark.parametrize("name", FILES)
def test_no_wrong_answer_is_paid(name: str) -> None:
    wrong = [row for row in load(name) if not row["right"]]
    assert [row for row in wrong if score(row["response"], golds_of(row)) != 0.0] == []


@pytest.mark.parametrize("name", FILES)
def test_no_right_answer_is_refused(name: str) -> None:
    right = [row for row in load(name) if row["right"]]
    assert [row for row in right if score(row["response"], golds_of(row)) != 1.0] == []


def test_verifier_processes_judge_the_same(verifier: VerifierPool) -> None:
    rows = load("marked_answers.json")
    verdicts = verifier.verify([row["response"] for row in rows], [golds_of(row) for row in rows])
    assert [verdict.reward for verdict in verdicts] == [float(row["right"]) for row in rows]
    assert {verdict.status for verdict in verdicts} == {"ok"}


@pytest.mark.parametrize("name", FILES)
def test_an_answer_agrees_with_a_ground_truth_that_it_is_right_for(name: str) -> None:
    """Groups of answers are those of the verifier, for ground truths that are an answer by themselves."""
    rows = [
        row
        for row in load(name)
        if row["right"] and row["response"].startswith("So the answer is $\\boxed{")
    ]
    plain = [row for row in rows if row["kind"] != "gold"]
    assert len(plain) > 20
    assert [row for row in plain if agree(row["response"], golds_of(row)) != 1.0] == []


@pytest.mark.parametrize("name", FILES)
def test_every_ground_truth_is_right_for_itself(name: str) -> None:
    golds = [gold for row in load(name) if row["kind"] != "gold" for gold in golds_of(row)]
    assert [gold for gold in golds if score(f"\\boxed{{{gold}}}", (gold,)) != 1.0] == []
