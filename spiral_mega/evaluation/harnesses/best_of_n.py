"""Harness `best_of_n`: the reward of the best of k independent responses, picked by an oracle, the verifier.

With rewards 0 and 1 it is pass@k; it differs where a verifier gives part of the reward.
"""

from __future__ import annotations

from collections.abc import Sequence

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.harnesses import BestOfN
from spiral_mega.evaluation.graded_episode import GradedEpisode, Measure
from spiral_mega.evaluation.harnesses.independent_samples import numbers_of_samples, samples_measure, samples_plan
from spiral_mega.statistics.estimators import best_of_k


def sampling_plan(harness: BestOfN, longest: int) -> SamplingPlan:
    return samples_plan(harness)


def measure(harness: BestOfN, plan: SamplingPlan, graded: Sequence[GradedEpisode], longest: int) -> list[Measure]:
    return [
        samples_measure(harness, "best", k, [best_of_k(each.rewards, k) for each in graded], graded, longest)
        for k in numbers_of_samples(harness)
    ]
