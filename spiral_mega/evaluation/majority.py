"""Harness `majority`: the answer that most of k independent responses give (the paper's figure 8).

Answers are the same when the verifier says so, not when they are spelt alike. A response without an answer has no vote.
Answers tied for the most votes are chosen among with equal probability, so the value is the mean of their rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

from spiral_mega.algorithm.plan import Plan
from spiral_mega.config.harnesses import Majority
from spiral_mega.evaluation.estimators import majority_of_k
from spiral_mega.evaluation.judged import Judged, Measure
from spiral_mega.evaluation.samples import numbers_of_samples, samples_measure, samples_plan


def plan(harness: Majority, longest: int) -> Plan:
    return samples_plan(harness)


def measure(harness: Majority, plan: Plan, judged: Sequence[Judged], longest: int) -> list[Measure]:
    ks = numbers_of_samples(harness)
    values = [majority_of_k(each.groups, each.rewards, ks) for each in judged]
    return [
        samples_measure(harness, "majority", k, list(column), judged, longest)
        for k, column in zip(ks, zip(*values, strict=True), strict=True)
    ]
