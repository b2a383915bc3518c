"""SPIRAL: search traces learn from the sets they were in, aggregation traces from their own reward (paper, 3.2)."""

from __future__ import annotations

from spiral_mega.algorithm.credit import spiral_advantages
from spiral_mega.algorithm.length_gate import assign_gated
from spiral_mega.algorithm.sets import check_design, gradient_scale
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import AGGREGATION, SEARCH, Episode


class Spiral:
    """Marginal set advantages for the search traces, within-set ones for the aggregation traces."""

    components = (SEARCH, AGGREGATION)
    aggregates = True

    def __init__(self, config: AlgorithmConfig) -> None:
        """`config`: the counts that are sampled, and the length gate."""
        self._config = config

    def assign(self, episode: Episode) -> None:
        """Equations 8, 9 and 10. A search trace's own reward plays no part.

        Raises ValueError if the episode lacks sets, or a set its N2 aggregation traces.
        """
        if not episode.sets or len(episode.aggregation) != len(episode.sets):
            raise ValueError(
                f"problem {episode.problem.id} has {len(episode.sets)} sets and {len(episode.aggregation)} groups of "
                "aggregation traces: spiral needs one group for each set, and at least one set"
            )
        rewards = [[trace.reward for trace in group] for group in episode.aggregation]
        search, aggregation = spiral_advantages(episode.sets, rewards, len(episode.search))
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


def build(config: AlgorithmConfig) -> Spiral:
    """The recipe, if the configuration asks nothing of it that it does not do."""
    if config.normalize_std:
        raise ValueError(
            "algorithm.normalize_std is true, but spiral divides by no standard deviation: set it to false, "
            "or algorithm.objective to grpo"
        )
    check_design(config.search_traces, config.set_size, config.num_sets, config.set_design)
    return Spiral(config)
