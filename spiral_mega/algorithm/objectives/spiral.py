"""SPIRAL: search traces learn from the sets they were in, aggregation traces from their own reward
(paper, 3.2).

J = E[r(y*)], y* ~ pi(. | x, y_1..y_n), y_i ~ pi(. | x) (eq. 5). E[update] = M grad_search J + K (N2
- 1) grad_aggregation J (proposition 3.1).
"""

from __future__ import annotations

from spiral_mega.algorithm.advantages import spiral_advantages
from spiral_mega.algorithm.length_gate import assign_gated
from spiral_mega.algorithm.objectives import NoOptions
from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.algorithm.sets import gradient_scale
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import AGGREGATION, SEARCH, Episode, aggregation_rewards


class Spiral:
    """Marginal set advantages for the search traces, within-set ones for the aggregation traces."""

    components = (SEARCH, AGGREGATION)

    def __init__(self, config: AlgorithmConfig) -> None:
        """`config`: the counts that are sampled, and the length gate. Raises ValueError as `check_design` does."""
        self.plan = SamplingPlan.from_algorithm(config)
        self._config = config

    def assign_credit(self, episode: Episode) -> None:
        """Equations 8, 9 and 10. A search trace's own reward plays no part.

        Raises ValueError if the episode lacks sets, or a set its N2 aggregation traces.
        """
        search, aggregation = spiral_advantages(
            episode.sets, aggregation_rewards(episode), len(episode.search)
        )
        assign_gated(episode.search, search, self._config.target_length)
        for group, advantages in zip(episode.aggregation, aggregation, strict=True):
            assign_gated(group, advantages, self._config.target_length)

    def gradient_scales(self) -> dict[str, float]:
        """M of proposition 3.1 for search, K (N2 - 1) for aggregation."""
        c = self._config
        return {
            SEARCH: gradient_scale(c.search_traces, c.set_size, c.num_sets, c.set_design),
            AGGREGATION: float(c.num_sets * (c.aggregation_traces - 1)),
        }


def build(config: AlgorithmConfig, options: NoOptions) -> Spiral:
    """The recipe."""
    return Spiral(config)
