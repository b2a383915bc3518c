"""GRPO: search traces only, each compared with the mean reward of its problem's group.

A_j = r_j - mean(r), optionally divided by the group's standard deviation. E[update] = (N1 - 1) grad
E[r(y)]; with the standard deviation it is biased towards problems whose rewards differ little. Dr.
GRPO uses neither the deviation nor means over lengths (`loss_reduction: sum`). DAPO uses
`token_mean`, the deviation, and ppo_clip with clip_high above clip_low.
"""

from __future__ import annotations

from pydantic import Field

from spiral_mega.algorithm.advantages import group_advantages
from spiral_mega.algorithm.length_gate import assign_gated
from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.config.section import Section
from spiral_mega.traces import SEARCH, Episode


class Options(Section):
    """Options of the recipe."""

    normalize_std: bool = Field(
        default=False,
        description="Divide advantages by the population standard deviation of their group.",
    )


class Grpo:
    """Group advantages, divided by the group's standard deviation if `normalize_std`."""

    components = (SEARCH,)

    def __init__(self, config: AlgorithmConfig, options: Options) -> None:
        """Read search_traces and target_length of `config`."""
        self.plan = SamplingPlan(config.search_traces)
        self._normalize_std, self._target_length = options.normalize_std, config.target_length

    def assign_credit(self, episode: Episode) -> None:
        """A_j = r_j - mean(r), then the length gate."""
        advantages = group_advantages(
            [trace.reward for trace in episode.search], self._normalize_std
        )
        assign_gated(episode.search, advantages, self._target_length)

    def gradient_scales(self) -> dict[str, float]:
        """N1 - 1, since the group mean includes the trace's own reward; ValueError with `normalize_std`."""
        if self._normalize_std:
            raise ValueError(
                "algorithm.options.normalize_std is true, so the expected update is no multiple of "
                "the gradient: set it to false, or algorithm.component_weights to 'paper' or "
                "numbers"
            )
        return {SEARCH: float(self.plan.search_traces - 1)}


def build(config: AlgorithmConfig, options: Options) -> Grpo:
    """Build the recipe."""
    return Grpo(config, options)
