"""What sampled episodes tell of a model beyond its accuracy.

Each module has two pure functions: `facts` of one episode, small enough to be kept for every problem, and `summary` of
many episodes' facts, with 95 % bootstrap intervals over problems. They serve evaluations and training traces alike.
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
    """The facts of every part, as JSON; `groups` names the answer of each of `episode.traces()`."""
    return {name: part.facts(episode, groups) for name, part in PARTS.items()}


def summarise(facts: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Every part's summary of these episodes, as JSON."""
    return {name: part.summary([each[name] for each in facts], seed) for name, part in PARTS.items()}
