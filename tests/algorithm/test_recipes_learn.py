"""A short training run of each recipe, on sampled episodes of the tiny policy, moves its own objective up."""

import itertools

import numpy as np
import pytest

from spiral_mega.algorithm.objectives import make_objective
from tests.algorithm.test_recipe_gradients import best, by_order, colourful, voted
from tests.algorithm.tiny_policy import (
    RESPONSES,
    THETA,
    algorithm,
    expectation,
    expected_gradient,
    mean_reward,
    probability,
    sample_episode,
    spiral_goal,
)

PAIRS = list(itertools.product(RESPONSES, repeat=2))


def of_sets(score, size):
    return lambda theta: expectation(score, size, theta)


def useful(theta):
    return spiral_goal(theta, theta)


def separate_goal(theta):
    return mean_reward(theta) + useful(theta)


def aggregation_goal(theta):
    """Of the aggregation alone, for sets as they were written at the start."""
    return spiral_goal(THETA, theta)


def twice_aggregated(theta):
    """The reward of an answer to two answers, each to a pair of search traces of its own."""
    first = {
        z: sum(
            probability(a, theta) * probability(b, theta) * probability(z, theta, (a, b)) for a, b in PAIRS
        ) for z in RESPONSES
    }  # fmt: skip
    return sum(first[a] * first[b] * mean_reward(theta, (a, b)) for a, b in PAIRS)


def of_sizes(theta):
    return sum(spiral_goal(theta, theta, size) for size in (1, 2, 3))


LEVELS = [{"set_size": 2, "num_sets": 4}, {"set_size": 2, "num_sets": 3}]
SETS = {"search_traces": 6, "num_sets": 6}
RECIPES = {
    "grpo": (mean_reward, {"search_traces": 6}),
    "rloo": (mean_reward, {"search_traces": 6}),
    "spiral": (useful, SETS),
    "separate": (separate_goal, SETS),
    "aggregation_only": (aggregation_goal, SETS),
    "passk": (of_sets(best, 2), SETS),
    "majority": (of_sets(voted, 3), {**SETS, "set_size": 3}),
    "polychromic": (of_sets(colourful, 2), SETS),
    "custom": (
        of_sets(by_order, 2),
        {
            **SETS,
            "set_design": "ordered",
            "options": {"score": "tests.algorithm.test_recipe_gradients:users_score"},
        },
    ),
}
RECIPES |= {
    "set_sizes": (of_sizes, {**SETS, "options": {"sizes": [1, 2, 3], "sizes_per_problem": 1}}),
    "recursive": (twice_aggregated, {"search_traces": 8, "options": {"levels": LEVELS}}),
}
STEPS, PROBLEMS, LEARNING_RATE = 30, 12, 0.4


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_moves_its_own_objective_up(name):
    goal, changes = RECIPES[name]
    config = algorithm(objective=name, component_weights="unbiased", **changes)
    plan, rng = make_objective(config).plan, np.random.default_rng(1)
    theta = THETA.copy()
    values = [goal(theta)]
    for _ in range(STEPS):
        episodes = [(1 / PROBLEMS, *sample_episode(plan, theta, rng)) for _ in range(PROBLEMS)]
        theta -= LEARNING_RATE * expected_gradient(config, episodes, theta)
        values.append(goal(theta))
    assert values[-1] > values[0] + 0.1
    assert values[STEPS // 2] > values[0]
