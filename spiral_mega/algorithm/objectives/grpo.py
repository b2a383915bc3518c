"""GRPO: search traces only, each against the mean reward of its problem's group.

A_j = r_j - mean(r), by choice divided by the group's standard deviation. E[update] = (N1 - 1) grad
E[r(y)]; with the standard deviation it is biased towards problems whose rewards differ little. Dr.
GRPO: neither the deviation nor means over lengths (`loss_reduction: sum`). DAPO: `token_mean`, the
deviation, and ppo_clip with clip_high above clip_low.
"""

from __future__ import annotations

from spiral_mega.algorithm.advantages import group_advantages
from spiral_mega.algorithm.length_gate import assign_gated
from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.config.section import Section
from spiral_mega.traces import SEARCH, Episode


class Options(Section):
    """`normalize_std`: divide advantages by their group's (population) standard deviation."""

    normalize_std: bool = False


class Grpo:
    """Group advantages, divided by the group's standard deviation if `normalize_std`."""

    components = (SEARCH,)

    def __init__(self, config: AlgorithmConfig, options: Options) -> None:
        """`config`: the counts that are sampled, and the length gate."""
        self.plan = SamplingPlan(config.search_traces)
        self._normalize_std, self._target_length = options.normalize_std, config.target_length

    def assign_credit(self, episode: Episode) -> None:
        """A_j = r_j - mean(r), then the length gate."""
        advantages = group_advantages(
            [trace.reward for trace in episode.search], self._normalize_std
        )
        assign_gated(episode.search, advantages, self._target_length)

    def gradient_scales(self) -> dict[str, float]:
        """N1 - 1: the mean that is subtracted holds the trace's own reward. ValueError with `normalize_std`."""
        if self._normalize_std:
            raise ValueError(
                "algorithm.options.normalize_std is true, and the expectation of such advantages "
                "is no multiple of the gradient: set it to false, or algorithm.component_weights "
                "to 'paper' or numbers"
            )
        return {SEARCH: float(self.plan.search_traces - 1)}


def build(config: AlgorithmConfig, options: Options) -> Grpo:
    """The recipe."""
    return Grpo(config, options)
