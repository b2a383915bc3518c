"""Harness `pass_at_k`: the probability that some of k responses is right (the paper's figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.evaluation.harnesses.harness import Measure
from spiral_mega.evaluation.harnesses.independent_samples import IndependentSamples
from spiral_mega.statistics.estimators import pass_at_k


class PassAtK(IndependentSamples):
    """Probability that some of k responses is right (reward 1 or more)."""

    kind: Literal["pass_at_k"] = "pass_at_k"

    def measure(self, graded: Sequence[GradedEpisode], max_response_tokens: int) -> list[Measure]:
        right = [_count_right(each) for each in graded]
        measures = []
        for k in self.reported_ks():
            values = [pass_at_k(self.samples, count, k) for count in right]
            measures.append(self.measure_at(k, "pass", values, graded, max_response_tokens))
        return measures


def _count_right(graded: GradedEpisode) -> int:
    return sum(reward >= 1.0 for reward in graded.rewards)
