"""RLOO: search traces only, each compared with the mean reward of the others of its problem.

A_j = r_j - mean of r_i over i != j. E[update] = N1 grad E[r(y)]: the baseline is independent of the
trace.
"""

from __future__ import annotations

from spiral_mega.algorithm.advantages import leave_one_out_advantages
from spiral_mega.algorithm.length_gate import assign_gated
from spiral_mega.algorithm.objectives import NoOptions
from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import SEARCH, Episode


class Rloo:
    """Leave-one-out advantages."""

    components = (SEARCH,)

    def __init__(self, config: AlgorithmConfig) -> None:
        """Read search_traces and target_length of `config`; raises ValueError for a single trace."""
        if config.search_traces < 2:
            raise ValueError(
                "algorithm.search_traces is 1, but rloo compares each trace with others: sample more"
            )
        self.plan = SamplingPlan(config.search_traces)
        self._target_length = config.target_length

    def assign_credit(self, episode: Episode) -> None:
        """A_j = r_j - the mean of the others, then the length gate."""
        advantages = leave_one_out_advantages([trace.reward for trace in episode.search])
        assign_gated(episode.search, advantages, self._target_length)

    def gradient_scales(self) -> dict[str, float]:
        """N1."""
        return {SEARCH: float(self.plan.search_traces)}


def build(config: AlgorithmConfig, options: NoOptions) -> Rloo:
    """Build the recipe."""
    return Rloo(config)
