"""GRPO: search traces only, each against the mean reward of its problem's group."""

from __future__ import annotations

from spiral_mega.algorithm.credit import group_advantages
from spiral_mega.algorithm.length_gate import assign_gated
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import SEARCH, Episode


class Grpo:
    """Group advantages, divided by the group's standard deviation if `normalize_std`."""

    components = (SEARCH,)
    aggregates = False

    def __init__(self, config: AlgorithmConfig) -> None:
        """`config`: the counts that are sampled, and the length gate."""
        self._config = config

    def assign(self, episode: Episode) -> None:
        """A_j = r_j - mean(r), then the length gate."""
        advantages = group_advantages([trace.reward for trace in episode.search], self._config.normalize_std)
        assign_gated(episode.search, advantages, self._config.target_length)

    def gradient_scales(self) -> dict[str, float]:
        """N - 1: the mean that is subtracted holds the trace's own reward. ValueError with `normalize_std`."""
        if self._config.normalize_std:
            raise ValueError(
                "algorithm.normalize_std is true, and the expectation of such advantages is no multiple of the "
                "gradient: set it to false, or algorithm.component_weights to 'paper' or numbers"
            )
        return {SEARCH: float(self._config.search_traces - 1)}


def build(config: AlgorithmConfig) -> Grpo:
    """The recipe."""
    return Grpo(config)
