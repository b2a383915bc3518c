"""SPIRAL (paper, 3.2): search traces learn from their sets, aggregation traces from their reward.

J = E[r(y*)], y* ~ pi(. | x, y_1..y_n), y_i ~ pi(. | x) (eq. 5). E[update] = M grad_search J +
K (N2 - 1) grad_aggregation J (proposition 3.1).
"""

from __future__ import annotations

from spiral_mega.algorithm.advantages import spiral_advantages
from spiral_mega.algorithm.length_gate import assign_gated, assign_gated_groups
from spiral_mega.algorithm.objectives import NoOptions
from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.algorithm.sets import gradient_scale
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import AGGREGATION, SEARCH, Episode, aggregation_rewards


class Spiral:
    """Marginal set advantages for the search traces, within-set ones for the aggregation traces."""

    components = (SEARCH, AGGREGATION)

    def __init__(self, config: AlgorithmConfig) -> None:
        """Read the sample counts and the length gate of `config`; raises ValueError as `check_design` does."""
        self.plan = SamplingPlan.from_algorithm(config)
        self._config = config

    def assign_credit(self, episode: Episode) -> None:
        """Assign credit by equations 8, 9 and 10. The reward of a search trace itself is not used.

        Raises ValueError if there are no sets, or not N2 aggregation traces for each.
        """
        rewards = aggregation_rewards(episode)
        search, aggregation = spiral_advantages(episode.sets, rewards, len(episode.search))
        assign_gated(episode.search, search, self._config.target_length)
        assign_gated_groups(episode.aggregation, aggregation, self._config.target_length)

    def gradient_scales(self) -> dict[str, float]:
        """M of proposition 3.1 for search, K (N2 - 1) for aggregation."""
        c = self._config
        return {
            SEARCH: gradient_scale(c.search_traces, c.set_size, c.num_sets, c.set_design),
            AGGREGATION: float(c.num_sets * (c.aggregation_traces - 1)),
        }


def build(config: AlgorithmConfig, options: NoOptions) -> Spiral:
    """Build the recipe."""
    return Spiral(config)
