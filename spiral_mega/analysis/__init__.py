"""What sampled episodes show of a model beyond its accuracy.

    episode --episode_stats--> stats of one episode, as JSON, small enough to keep for every problem
            --aggregate------> summary of many episodes, with 95 % bootstrap intervals over problems

Each part is a module with two pure functions of these names. They serve evaluations and training
traces alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spiral_mega.analysis import aggregation, diversity, entropy, tokens, verification
from spiral_mega.rewards.agreement import Groups
from spiral_mega.traces import Episode

PARTS: dict[str, Any] = {
    "diversity": diversity,
    "entropy": entropy,
    "aggregation": aggregation,
    "verification": verification,
    "tokens": tokens,
}


def episode_stats(episode: Episode, groups: Groups) -> dict[str, Any]:
    """Compute every part's stats; `groups` holds the answer group of each of `episode.traces()`."""
    return {name: part.episode_stats(episode, groups) for name, part in PARTS.items()}


def aggregate(stats: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Summarize the stats of many episodes, part by part; `seed` is that of the bootstrap."""
    summaries = {}
    for name, part in PARTS.items():
        of_part = [each[name] for each in stats]
        summaries[name] = part.aggregate(of_part, seed)
    return summaries
