"""Harness `majority`: the answer that most of k independent responses give (the paper's figure 8).

Two answers are the same when the verifier says so, not when they are spelled alike. A response
without an answer has no vote. Answers tied for the most votes win with equal probability, so the
value is the mean of their rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.evaluation.harnesses.harness import Measure
from spiral_mega.evaluation.harnesses.independent_samples import IndependentSamples
from spiral_mega.statistics.estimators import majority_of_k


class Majority(IndependentSamples):
    """Reward of the answer that most of k responses give."""

    kind: Literal["majority"] = "majority"

    def measure(self, graded: Sequence[GradedEpisode], max_response_tokens: int) -> list[Measure]:
        ks = self.reported_ks()
        by_problem = [majority_of_k(each.groups, each.rewards, ks) for each in graded]
        by_k = zip(*by_problem, strict=True)
        measures = []
        for k, values in zip(ks, by_k, strict=True):
            measures.append(
                self.measure_at(k, "majority", list(values), graded, max_response_tokens)
            )
        return measures
