"""Harness `pass_at_k`: the probability that some of k independent responses is right (the paper's figure 3)."""

from __future__ import annotations

from collections.abc import Sequence

from spiral_mega.algorithm.plan import Plan
from spiral_mega.config.harnesses import PassAtK
from spiral_mega.evaluation.estimators import pass_at_k
from spiral_mega.evaluation.judged import Judged, Measure
from spiral_mega.evaluation.samples import numbers_of_samples, samples_measure, samples_plan


def plan(harness: PassAtK, longest: int) -> Plan:
    return samples_plan(harness)


def measure(harness: PassAtK, plan: Plan, judged: Sequence[Judged], longest: int) -> list[Measure]:
    right = [sum(reward >= 1.0 for reward in each.rewards) for each in judged]
    return [
        samples_measure(harness, "pass", k, [pass_at_k(harness.samples, count, k) for count in right], judged, longest)
        for k in numbers_of_samples(harness)
    ]
