"""The gradient of the whole objective, from credit through weights and loss, against finite differences.

A tiny autoregressive policy with five shared parameters writes the search traces and the aggregation traces:
one or two tokens each, stop = 0. Every outcome of an episode is enumerated with its probability; all go through the
package as one packed batch, and the expected gradient is compared with that of the enumerated objective.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from spiral_mega.algorithm.losses import make_loss
from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.algorithm.weighting import component_totals, make_weighting
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import AGGREGATION, SEARCH, Episode, Problem, Trace

RESPONSES = ((0,), (1, 0), (1, 1))
THETA = np.array([0.3, -0.5, 0.8, -0.4, 0.6])
REWARD = {(0,): 0.2, (1, 0): 1.0, (1, 1): -0.5}


def features(shown, position):
    """Inputs of the logit of token 1: `shown` is None for search, else the set's responses, whose order matters."""
    if shown is None:
        return [1.0, float(position), 0.0, 0.0, 0.0]
    first, second = shown
    return [1.0, float(position), float(len(first)), float(sum(second)), float(first == second) * (1 - position)]


def probability(response, theta, shown=None):
    """pi(response), by plain arithmetic."""
    total = 1.0
    for position, token in enumerate(response):
        one = 1 / (1 + math.exp(-float(np.dot(features(shown, position), theta))))
        total *= one if token else 1 - one
    return total


def spiral_goal(search_theta, aggregation_theta):
    """E[r(y*)] over two search responses and the aggregation of them (eq. 5), enumerated."""
    return sum(
        probability(a, search_theta)
        * probability(b, search_theta)
        * probability(final, aggregation_theta, (a, b))
        * REWARD[final]
        for a, b, final in itertools.product(RESPONSES, repeat=3)
    )


def finite_differences(goal):
    steps = np.eye(len(THETA)) * 1e-5
    return np.array([(goal(THETA + step) - goal(THETA - step)) / 2e-5 for step in steps])


def trace(component, index, response, shown, reward, set_index=None):
    logprobs = [0.0] * len(response)
    made = Trace(component, index, [], list(response), logprobs, "stop", "", set_index=set_index, reward=reward)
    return made, shown


def spiral_outcomes(draws):
    """(probability, search traces, groups of aggregation traces, sets) for each draw of the sets and each outcome.

    A trace comes with what its policy was shown. The search traces' own rewards are NaN: no one may read them.
    """
    pairs = itertools.product(RESPONSES, repeat=2)
    table = {(y, shown): probability(y, THETA, shown) for shown in pairs for y in RESPONSES}
    alone = {y: probability(y, THETA) for y in RESPONSES}
    for pool in itertools.product(RESPONSES, repeat=3):
        for sets in draws:
            shown = [tuple(pool[j] for j in chosen) for chosen in sets]
            for finals in itertools.product(RESPONSES, repeat=2 * len(sets)):
                chance = math.prod(alone[y] for y in pool) / len(draws)
                search = [trace(SEARCH, j, y, None, math.nan) for j, y in enumerate(pool)]
                groups = []
                for k in range(len(sets)):
                    group = finals[2 * k : 2 * k + 2]
                    chance *= math.prod(table[y, shown[k]] for y in group)
                    groups.append([trace(AGGREGATION, i, y, shown[k], REWARD[y], k) for i, y in enumerate(group)])
                yield chance, search, groups, sets


def expected_gradient(config, outcomes):
    """The expected gradient of the loss, for a batch of one problem."""
    objective = make_objective(config)
    weighting = make_weighting(config, objective)
    inputs, targets, advantages, ids, weights = [], [], [], [], []
    next_id = itertools.count()
    for chance, search, groups, sets in outcomes:
        seen = [*search, *itertools.chain.from_iterable(groups)]
        plain = [[made for made, _ in group] for group in groups]
        episode = Episode(Problem("p", (), ("1",), "exact"), 0, [made for made, _ in search], list(sets), plain)
        objective.assign(episode)
        totals = component_totals([episode], objective.components)
        for made, shown in seen:
            sequence = next(next_id)
            weight = chance * weighting.trace_weight(made, totals)
            for position, token in enumerate(made.response_ids):
                inputs.append(features(shown, position))
                targets.append(token)
                advantages.append(made.advantage)
                ids.append(sequence)
                weights.append(weight)
    theta = torch.tensor(THETA, requires_grad=True)
    logits = torch.tensor(inputs, dtype=torch.float64) @ theta
    signs = torch.tensor(targets, dtype=torch.float64) * 2 - 1
    logprobs = torch.nn.functional.logsigmoid(signs * logits)
    token_loss = make_loss(config)(
        logprobs, logprobs.detach(), torch.tensor(advantages, dtype=torch.float64), torch.tensor(ids)
    )
    assert not token_loss.masked.any()
    assert not token_loss.clipped.any()
    (token_loss.loss * torch.tensor(weights, dtype=torch.float64)).sum().backward()
    return theta.grad.numpy()


UNIFORM = list(itertools.combinations(itertools.combinations(range(3), 2), 2))


def algorithm(**changes):
    return AlgorithmConfig(**{"search_traces": 3, "set_size": 2, "num_sets": 2, "aggregation_traces": 2, **changes})


def test_unbiased_weights_give_the_gradient_of_the_goal():
    truth = finite_differences(lambda theta: spiral_goal(theta, theta))
    gradient = expected_gradient(algorithm(component_weights="unbiased"), spiral_outcomes(UNIFORM))
    assert np.abs(truth).min() > 1e-3
    np.testing.assert_allclose(-gradient, truth, rtol=0, atol=1e-9)


def test_paper_weights_give_the_two_terms_at_their_scales():
    # M = (3/2) (1 - 0) - 1 = 1/2: two of three pairs cover all three traces. K (N2 - 1) = 2.
    search = finite_differences(lambda theta: spiral_goal(theta, THETA))
    aggregation = finite_differences(lambda theta: spiral_goal(THETA, theta))
    gradient = expected_gradient(algorithm(), spiral_outcomes(UNIFORM))
    np.testing.assert_allclose(-gradient, search / 2 + 2 * aggregation, rtol=0, atol=1e-9)


@pytest.mark.parametrize("loss", ["ppo_clip", "cispo", "gspo", "truncated_importance_sampling"])
def test_on_policy_the_other_losses_give_the_same_gradient(loss):
    one_draw = spiral_outcomes(UNIFORM[:1])
    reference = expected_gradient(algorithm(), spiral_outcomes(UNIFORM[:1]))
    np.testing.assert_allclose(expected_gradient(algorithm(loss=loss), one_draw), reference, rtol=0, atol=1e-12)


def test_unbiased_grpo_gives_the_gradient_of_the_mean_reward():
    def outcomes():
        for pool in itertools.product(RESPONSES, repeat=4):
            chance = math.prod(probability(y, THETA) for y in pool)
            yield chance, [trace(SEARCH, j, y, None, REWARD[y]) for j, y in enumerate(pool)], [], []

    truth = finite_differences(lambda theta: sum(probability(y, theta) * REWARD[y] for y in RESPONSES))
    config = algorithm(objective="grpo", search_traces=4, component_weights="unbiased")
    np.testing.assert_allclose(-expected_gradient(config, outcomes()), truth, rtol=0, atol=1e-9)
