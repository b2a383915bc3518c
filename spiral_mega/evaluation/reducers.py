"""How a population of traces becomes one score."""

from __future__ import annotations

import math
from collections.abc import Callable

from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.statistics.estimators import majority_of_k


def mean(graded: GradedEpisode, positions: range) -> float:
    """The expected reward of one of them."""
    return math.fsum(graded.rewards[i] for i in positions) / len(positions)


def majority(graded: GradedEpisode, positions: range) -> float:
    """The reward of the answer that most of them give; ties as in `estimators.majority_of_k`."""
    groups, rewards = [graded.groups[i] for i in positions], [graded.rewards[i] for i in positions]
    return majority_of_k(groups, rewards, [len(positions)])[0]


def best(graded: GradedEpisode, positions: range) -> float:
    """The reward of the one that an oracle picks."""
    return max(graded.rewards[i] for i in positions)


READINGS: dict[str, Callable[[GradedEpisode, range], float]] = {"mean": mean, "majority": majority, "best": best}
