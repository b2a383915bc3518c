"""Aggregation only: aggregation traces learn from their own reward, search traces get no gradient.

A_li = r_li - f_l (eq. 9). E[update] = K (N2 - 1) grad_aggregation J. One model writes both kinds of
traces, so training on aggregation still changes its search traces; only their credit is zero.
"""

from __future__ import annotations

from spiral_mega.algorithm.advantages import aggregation_advantages
from spiral_mega.algorithm.length_gate import assign_gated, assign_gated_groups
from spiral_mega.algorithm.objectives import NoOptions
from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import AGGREGATION, Episode, aggregation_rewards


class AggregationOnly:
    """Within-set advantages for the aggregation traces, 0 for the search traces."""

    components = (AGGREGATION,)

    def __init__(self, config: AlgorithmConfig) -> None:
        """Read the sample counts and the length gate of `config`; raises ValueError as `check_design` does."""
        self.plan = SamplingPlan.from_algorithm(config)
        self._target_length = config.target_length

    def assign_credit(self, episode: Episode) -> None:
        """Compare each aggregation trace with its set; raises ValueError without sets or answers."""
        advantages = aggregation_advantages(aggregation_rewards(episode))
        assign_gated(episode.search, [0.0] * len(episode.search), None)
        assign_gated_groups(episode.aggregation, advantages, self._target_length)

    def gradient_scales(self) -> dict[str, float]:
        """K (N2 - 1)."""
        (level,) = self.plan.levels
        return {AGGREGATION: float(level.num_sets * (self.plan.aggregation_traces - 1))}


def build(config: AlgorithmConfig, options: NoOptions) -> AggregationOnly:
    """Build the recipe."""
    return AggregationOnly(config)
