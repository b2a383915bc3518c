"""Aggregation only: the aggregation traces learn from their own reward, search traces get no
gradient.

A_li = r_li - f_l (eq. 9). E[update] = K (N2 - 1) grad_aggregation J. One model writes both, so its
search moves along with what it learns of aggregation; what is frozen is the credit.
"""

from __future__ import annotations

from spiral_mega.algorithm.advantages import aggregation_advantages
from spiral_mega.algorithm.length_gate import assign_gated
from spiral_mega.algorithm.objectives import NoOptions
from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import AGGREGATION, Episode, aggregation_rewards


class AggregationOnly:
    """Within-set advantages for the aggregation traces, 0 for the search traces."""

    components = (AGGREGATION,)

    def __init__(self, config: AlgorithmConfig) -> None:
        """`config`: the counts that are sampled, and the length gate. Raises ValueError as `check_design` does."""
        self.plan = SamplingPlan.from_algorithm(config)
        self._target_length = config.target_length

    def assign_credit(self, episode: Episode) -> None:
        """Each aggregation trace against its set, then the length gate. Raises ValueError without sets or answers."""
        advantages = aggregation_advantages(aggregation_rewards(episode))
        assign_gated(episode.search, [0.0] * len(episode.search), None)
        for group, credit in zip(episode.aggregation, advantages, strict=True):
            assign_gated(group, credit, self._target_length)

    def gradient_scales(self) -> dict[str, float]:
        """K (N2 - 1)."""
        (level,) = self.plan.levels
        return {AGGREGATION: float(level.num_sets * (self.plan.aggregation_traces - 1))}


def build(config: AlgorithmConfig, options: NoOptions) -> AggregationOnly:
    """The recipe."""
    return AggregationOnly(config)
