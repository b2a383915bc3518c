"""Harness `best_of_n`: the reward of the best of k independent responses.

An oracle, the verifier, picks the best. With rewards 0 and 1 it equals pass@k; it differs where a
verifier gives part of the reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.evaluation.harnesses.harness import Measure
from spiral_mega.evaluation.harnesses.independent_samples import IndependentSamples
from spiral_mega.statistics.estimators import best_of_k


class BestOfN(IndependentSamples):
    """Reward of the best of k responses, picked by an oracle: the verifier."""

    kind: Literal["best_of_n"] = "best_of_n"

    def measure(self, graded: Sequence[GradedEpisode], max_response_tokens: int) -> list[Measure]:
        measures = []
        for k in self.reported_ks():
            values = [best_of_k(each.rewards, k) for each in graded]
            measures.append(self.measure_at(k, "best", values, graded, max_response_tokens))
        return measures
