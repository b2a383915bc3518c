"""Harness `pass_at_k`: the probability that some of k independent responses is right (the paper's figure 3)."""

from __future__ import annotations

from collections.abc import Sequence

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.harnesses import PassAtK
from spiral_mega.evaluation.graded_episode import GradedEpisode, Measure
from spiral_mega.evaluation.harnesses.independent_samples import numbers_of_samples, samples_measure, samples_plan
from spiral_mega.statistics.estimators import pass_at_k


def sampling_plan(harness: PassAtK, longest: int) -> SamplingPlan:
    return samples_plan(harness)


def measure(harness: PassAtK, plan: SamplingPlan, graded: Sequence[GradedEpisode], longest: int) -> list[Measure]:
    right = [sum(reward >= 1.0 for reward in each.rewards) for each in graded]
    return [
        samples_measure(harness, "pass", k, [pass_at_k(harness.samples, count, k) for count in right], graded, longest)
        for k in numbers_of_samples(harness)
    ]
