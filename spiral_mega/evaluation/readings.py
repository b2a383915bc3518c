"""How a population of traces becomes one score."""

from __future__ import annotations

import math
from collections.abc import Callable

from spiral_mega.evaluation.estimators import majority_of_k
from spiral_mega.evaluation.judged import Judged


def mean(judged: Judged, positions: range) -> float:
    """The expected reward of one of them."""
    return math.fsum(judged.rewards[i] for i in positions) / len(positions)


def majority(judged: Judged, positions: range) -> float:
    """The reward of the answer that most of them give; ties as in `estimators.majority_of_k`."""
    groups, rewards = [judged.groups[i] for i in positions], [judged.rewards[i] for i in positions]
    return majority_of_k(groups, rewards, [len(positions)])[0]


def best(judged: Judged, positions: range) -> float:
    """The reward of the one that an oracle picks."""
    return max(judged.rewards[i] for i in positions)


READINGS: dict[str, Callable[[Judged, range], float]] = {"mean": mean, "majority": majority, "best": best}
