"""Separate: search and aggregation each learn from their own rewards only.

A_j = r_j - mean(r) for search traces, r_li - f_l (eq. 9) for the aggregation traces of set l.
E[update] = (N1 - 1) grad E[r(y)] + K (N2 - 1) grad_aggregation J: a search trace learns to be
right, not to be useful to the aggregator. The natural baseline for SPIRAL, with the same samples.
"""

from __future__ import annotations

from spiral_mega.algorithm.advantages import aggregation_advantages, group_advantages
from spiral_mega.algorithm.length_gate import assign_gated, assign_gated_groups
from spiral_mega.algorithm.objectives import NoOptions
from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import AGGREGATION, SEARCH, Episode, aggregation_rewards


class Separate:
    """Group advantages within the search traces, and within each set's aggregation traces."""

    components = (SEARCH, AGGREGATION)

    def __init__(self, config: AlgorithmConfig) -> None:
        """Read the sample counts and the length gate of `config`; raises ValueError as `check_design` does."""
        self.plan = SamplingPlan.from_algorithm(config)
        self._target_length = config.target_length

    def assign_credit(self, episode: Episode) -> None:
        """Compare each trace with its group; raises ValueError without sets or answers."""
        advantages = aggregation_advantages(aggregation_rewards(episode))
        search_advantages = group_advantages([trace.reward for trace in episode.search])
        assign_gated(episode.search, search_advantages, self._target_length)
        assign_gated_groups(episode.aggregation, advantages, self._target_length)

    def gradient_scales(self) -> dict[str, float]:
        """N1 - 1 for search, K (N2 - 1) for aggregation."""
        (level,) = self.plan.levels
        return {
            SEARCH: float(self.plan.search_traces - 1),
            AGGREGATION: float(level.num_sets * (self.plan.aggregation_traces - 1)),
        }


def build(config: AlgorithmConfig, options: NoOptions) -> Separate:
    """Build the recipe."""
    return Separate(config)
