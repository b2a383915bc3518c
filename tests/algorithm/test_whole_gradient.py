"""The gradient of SPIRAL's whole objective, from credit through weights and loss, against finite differences.

Every outcome of an episode is enumerated with its probability (see tiny_policy.py); all go through the package as one
packed batch, and the expected gradient is compared with that of the enumerated objective.
"""

import math

import numpy as np
import pytest

from spiral_mega.traces import SEARCH
from tests.algorithm.tiny_policy import (
    THETA,
    algorithm,
    draws,
    expected_gradient,
    finite_differences,
    outcomes,
    spiral_goal,
)


def blind(episodes):
    """The same with search rewards that no one may read."""
    for chance, episode, shown in episodes:
        for trace in episode.search:
            assert trace.component == SEARCH
            trace.reward = math.nan
        yield chance, episode, shown


def test_unbiased_weights_give_the_gradient_of_the_goal():
    config = algorithm(component_weights="unbiased")
    truth = finite_differences(lambda theta: spiral_goal(theta, theta))
    gradient = expected_gradient(config, blind(outcomes(config, draws(config))))
    assert np.abs(truth).min() > 1e-3
    np.testing.assert_allclose(-gradient, truth, rtol=0, atol=1e-9)


def test_paper_weights_give_the_two_terms_at_their_scales():
    # M = (3/2) (1 - 0) - 1 = 1/2: two of three pairs cover all three traces. K (N2 - 1) = 2.
    config = algorithm()
    search = finite_differences(lambda theta: spiral_goal(theta, THETA))
    aggregation = finite_differences(lambda theta: spiral_goal(THETA, theta))
    gradient = expected_gradient(config, blind(outcomes(config, draws(config))))
    np.testing.assert_allclose(-gradient, search / 2 + 2 * aggregation, rtol=0, atol=1e-9)


@pytest.mark.parametrize("loss", ["ppo_clip", "cispo", "gspo", "truncated_importance_sampling"])
def test_on_policy_the_other_losses_give_the_same_gradient(loss):
    one_draw = draws(algorithm())[:1]
    reference = expected_gradient(algorithm(), outcomes(algorithm(), one_draw))
    gradient = expected_gradient(algorithm(loss={"name": loss}), outcomes(algorithm(), one_draw))
    np.testing.assert_allclose(gradient, reference, rtol=0, atol=1e-12)
