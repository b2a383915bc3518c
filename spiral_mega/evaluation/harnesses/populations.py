"""What the harnesses over populations (rsa, pipeline) share: traces of each level, and reducers.

position in Episode.traces():   0 .. population-1 | population .. | ...
level:                          search            | first answers | answers to sets of those | ...
"""

from __future__ import annotations

import math
from collections.abc import Callable

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.statistics.estimators import majority_of_k


def level_positions(plan: SamplingPlan) -> list[range]:
    """Return the positions of each level's traces: the search, then the answers to its sets."""
    positions = [range(plan.search_traces)]
    for level in plan.levels:
        first = positions[-1].stop
        positions.append(range(first, first + level.num_sets * plan.aggregation_traces))
    return positions


def level_budgets(plan: SamplingPlan, max_response_tokens: int) -> list[int]:
    """Return the most tokens that can be generated up to and including each level."""
    limits = [plan.max_tokens, *(level.max_tokens for level in plan.levels)]
    budgets, total = [], 0
    for positions, limit in zip(level_positions(plan), limits, strict=True):
        total += len(positions) * (limit or max_response_tokens)
        budgets.append(total)
    return budgets


def mean_reward(graded: GradedEpisode, positions: range) -> float:
    """Average the rewards: the expected reward of one of the traces."""
    return math.fsum(graded.rewards[i] for i in positions) / len(positions)


def majority_reward(graded: GradedEpisode, positions: range) -> float:
    """Return the reward of the most common answer; ties as in `estimators.majority_of_k`."""
    groups = [graded.groups[i] for i in positions]
    rewards = [graded.rewards[i] for i in positions]
    return majority_of_k(groups, rewards, [len(positions)])[0]


def best_reward(graded: GradedEpisode, positions: range) -> float:
    """Return the largest reward: what an oracle that picks one of the traces gets."""
    return max(graded.rewards[i] for i in positions)


REDUCERS: dict[str, Callable[[GradedEpisode, range], float]] = {
    "mean": mean_reward,
    "majority": majority_reward,
    "best": best_reward,
}
"""How the rewards of a population become one score, by name."""
