"""Each recipe's expected update is its scale times the gradient of what it says that it optimises, by enumeration."""

import itertools
import math

import numpy as np
import pytest

from spiral_mega.algorithm.advantages import group_advantages
from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.traces import AGGREGATION, SEARCH
from tests.algorithm.tiny_policy import (
    ANSWER,
    REWARD,
    THETA,
    algorithm,
    draws,
    expectation,
    expected_gradient,
    finite_differences,
    mean_reward,
    outcomes,
    spiral_goal,
)

SINGLE = [(1.0, ())]


def best(*chosen):
    return max(REWARD[y] for y in chosen)


def voted(*chosen):
    """The mean reward of the most frequent answers, from counts."""
    answers = [ANSWER[y] for y in chosen]
    most = max(map(answers.count, answers))
    means = {
        a: sum(REWARD[y] for y in chosen if ANSWER[y] == a) / most
        for a in set(answers)
        if answers.count(a) == most
    }
    return sum(means.values()) / len(means)


def colourful(*chosen):
    return (
        sum(REWARD[y] for y in chosen)
        / len(chosen)
        * len({ANSWER[y] for y in chosen})
        / len(chosen)
    )


def colourful_texts(*chosen):
    return sum(REWARD[y] for y in chosen) / len(chosen) * len(set(chosen)) / len(chosen)


def by_order(*chosen):
    return sum(REWARD[y] / (i + 1) for i, y in enumerate(chosen)) * (1 + len(chosen[0]))


def users_score(problem, traces):
    """What a user would write, and name in algorithm.options.score."""
    assert problem.id == "p"
    return by_order(*(tuple(trace.response_ids) for trace in traces))


def needs_three(problem, traces, more):
    return 0.0


def fails(problem, traces):
    raise RuntimeError("no score today")


SET_RECIPES = {
    "passk": (best, {}),
    "majority": (voted, {}),
    "polychromic": (colourful, {}),
    "polychromic by texts": (colourful_texts, {"diversity": "texts"}),
    "custom": (by_order, {"score": f"{__name__}:users_score"}),
}
# N1, n, K; the majority of two is a tie or a unanimity, so that of three is here as well.
SHAPES = [(4, 2, 2, "uniform"), (4, 3, 2, "uniform"), (3, 2, 2, "ordered"), (4, 2, 2, "balanced")]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SET_RECIPES)
def test_set_recipes_climb_the_expected_score_of_a_set(name, shape):
    """With unbiased weights the update is the gradient itself, whatever the design: the scale is the right one."""
    goal, options = SET_RECIPES[name]
    traces, size, sets, design = shape
    config = algorithm(
        objective=name.split()[0], options=options, search_traces=traces, set_size=size, num_sets=sets,
        set_design=design, component_weights="unbiased",
    )  # fmt: skip
    truth = finite_differences(lambda theta: expectation(goal, size, theta))
    assert np.abs(truth).max() > 1e-2
    gradient = expected_gradient(config, outcomes(config, draws(config)))
    np.testing.assert_allclose(-gradient, truth, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("objective", "scale"), [("grpo", 3), ("rloo", 4)])
def test_group_recipes_climb_the_mean_reward_at_their_scales(objective, scale):
    config = algorithm(objective=objective, search_traces=4)
    truth = finite_differences(mean_reward)
    assert make_objective(config).gradient_scales() == {SEARCH: scale}
    np.testing.assert_allclose(
        -expected_gradient(config, outcomes(config, SINGLE)), scale * truth, rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.9])
def test_the_deviation_scales_a_problems_update_by_how_hard_it_is(p):
    """The documented bias of normalize_std. For rewards 0 or 1 with k of N successes the update on the success' logit
    is sqrt(k (N - k)), so E[update] is the gradient p (1 - p) times a factor of p: no single scale fits all problems.
    """
    n = 6
    expected = sum(
        math.comb(n, k) * p**k * (1 - p) ** (n - k) * math.sqrt(k * (n - k)) for k in range(n + 1)
    )
    update = 0.0
    for rewards in itertools.product([0.0, 1.0], repeat=n):
        chance = math.prod(p if reward else 1 - p for reward in rewards)
        update += chance * sum(
            a * (r - p) for a, r in zip(group_advantages(rewards, True), rewards, strict=True)
        )
    assert update == pytest.approx(expected, rel=1e-12)
    assert update / (p * (1 - p)) > 5  # the scale without the deviation is N - 1 = 5


def test_separate_teaches_search_to_be_right_and_aggregation_to_use_what_it_gets():
    config = algorithm(objective="separate")
    own = finite_differences(mean_reward)
    aggregation = finite_differences(lambda theta: spiral_goal(THETA, theta))
    assert make_objective(config).gradient_scales() == {SEARCH: 2, AGGREGATION: 2}
    gradient = expected_gradient(config, outcomes(config, draws(config)))
    np.testing.assert_allclose(-gradient, 2 * own + 2 * aggregation, rtol=0, atol=1e-9)
    # And not to be useful: the set gradient is another one.
    useful = finite_differences(lambda theta: spiral_goal(theta, THETA))
    assert np.abs(own - useful).max() > 0.05


@pytest.mark.parametrize("weights", ["paper", "unbiased"])
def test_aggregation_only_has_no_gradient_through_search(weights):
    config = algorithm(objective="aggregation_only", component_weights=weights)
    truth = finite_differences(lambda theta: spiral_goal(THETA, theta)) * (
        2 if weights == "paper" else 1
    )
    gradient = expected_gradient(config, outcomes(config, draws(config)))
    np.testing.assert_allclose(-gradient, truth, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("needs_three", r"algorithm\.options\.score is .*needs_three.*2 arguments"),
        ("missing", r"algorithm\.options\.score is .*no attribute 'missing'"),
    ],
)
def test_a_score_that_cannot_serve_is_refused_at_the_start(score, message):
    with pytest.raises(ValueError, match=message):
        make_objective(algorithm(objective="custom", options={"score": f"{__name__}:{score}"}))


def test_a_score_that_fails_is_named_with_its_problem():
    config = algorithm(objective="custom", options={"score": f"{__name__}:fails"})
    _, episode, _ = next(outcomes(config, draws(config)))
    with pytest.raises(
        ValueError, match=r"fails failed on a set of problem p \(RuntimeError: no score today\)"
    ):
        make_objective(config).assign_credit(episode)


@pytest.mark.parametrize("objective", ["passk", "separate", "aggregation_only", "spiral"])
def test_an_episode_without_sets_is_refused(objective):
    _, episode, _ = next(outcomes(algorithm(objective="grpo"), SINGLE))
    with pytest.raises(ValueError, match="problem p has "):
        make_objective(algorithm(objective=objective)).assign_credit(episode)


def test_answers_with_as_many_votes_count_alike():
    """In whichever order they stand: the first of them would be as good on average, and noisier."""
    config = algorithm(objective="majority", search_traces=4, set_size=3)
    _, episode, _ = next(outcomes(config, [(1.0, ((0, 1, 2), (1, 2, 3)))]))
    for trace, answer, reward in zip(episode.search, "1233", [1.0, 0.0, 0.5, 0.5], strict=True):
        trace.text, trace.reward = f"\\boxed{{{answer}}}", reward
    make_objective(config).assign_credit(episode)  # f = (1 + 0 + 1/2) / 3 and 1/2
    assert [trace.advantage for trace in episode.search] == [0.0, 0.0, 0.0, 0.0]


def test_traces_without_an_answer_have_no_vote():
    config = algorithm(objective="majority", num_sets=3)
    _, episode, _ = next(outcomes(config, draws(config)))
    for trace, text, reward in zip(
        episode.search, ["<think> endless", "<think> too", "\\boxed{7}"], [1, 1, 0], strict=True
    ):
        trace.text, trace.reward = text, float(reward)
    make_objective(config).assign_credit(
        episode
    )  # sets (0, 1): no vote; (0, 2), (1, 2): the 7, which is wrong
    assert [trace.advantage for trace in episode.search] == [0.0, 0.0, 0.0]
