"""What harnesses and analysis need of a graded episode. Small: no text, no token ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from spiral_mega.rewards.agreement import Groups
from spiral_mega.traces import Episode

TOKEN_CATEGORIES = ("prompt", "generated", "cached")
"""Tokens of the prompt, generated tokens, and tokens of the prompt in the engine's cache."""


@dataclass(frozen=True, slots=True)
class GradedEpisode:
    """Rewards, answers and token counts of an episode's traces, in the order of `Episode.traces()`.

    groups             the group of each answer; equal answers share one (see rewards.agreement)
    tokens             by category (`TOKEN_CATEGORIES`), the tokens of each trace
    truncated_rewards  by token budget, as text: rewards of the search traces truncated to it
    stats              what the analysis needs: `analysis.episode_stats`
    """

    problem: str
    rewards: list[float]
    groups: Groups
    tokens: dict[str, list[int]]
    truncated_rewards: dict[str, list[float]] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_episode(
        cls,
        episode: Episode,
        groups: Groups,
        truncated_rewards: dict[str, list[float]],
        stats: dict[str, Any],
    ) -> GradedEpisode:
        traces = episode.traces()
        rewards = [trace.reward for trace in traces]
        tokens = {
            "prompt": [len(trace.prompt_ids) for trace in traces],
            "generated": [trace.length for trace in traces],
            "cached": [trace.cached_tokens for trace in traces],
        }
        return cls(episode.problem.id, rewards, groups, tokens, truncated_rewards, stats)

    def tokens_spent(self, positions: Iterable[int]) -> dict[str, float]:
        """Sum the tokens of the traces at these positions, by category."""
        chosen = list(positions)
        spent = {}
        for category in TOKEN_CATEGORIES:
            counts = self.tokens[category]
            spent[category] = float(sum(counts[i] for i in chosen))
        return spent
