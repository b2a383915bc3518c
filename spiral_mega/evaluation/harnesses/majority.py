"""Harness `majority`: the answer that most of k independent responses give (the paper's figure 8).

Answers are the same when the verifier says so, not when they are spelt alike. A response without an answer has no vote.
Answers tied for the most votes are chosen among with equal probability, so the value is the mean of their rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.harnesses import Majority
from spiral_mega.evaluation.graded_episode import GradedEpisode, Measure
from spiral_mega.evaluation.harnesses.independent_samples import numbers_of_samples, samples_measure, samples_plan
from spiral_mega.statistics.estimators import majority_of_k


def sampling_plan(harness: Majority, longest: int) -> SamplingPlan:
    return samples_plan(harness)


def measure(harness: Majority, plan: SamplingPlan, graded: Sequence[GradedEpisode], longest: int) -> list[Measure]:
    ks = numbers_of_samples(harness)
    values = [majority_of_k(each.groups, each.rewards, ks) for each in graded]
    return [
        samples_measure(harness, "majority", k, list(column), graded, longest)
        for k, column in zip(ks, zip(*values, strict=True), strict=True)
    ]
