"""Two models (paper, appendix B): each one's expected update is its own gradient of J(theta, phi), the other's held.

By enumeration of every episode (tiny_policy.py), theta and phi apart, against finite differences of the goal.
"""

import numpy as np
import pytest

from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.config.model_set import model_for
from spiral_mega.traces import AGGREGATION, SEARCH
from tests.algorithm.tiny_policy import (
    THETA,
    algorithm,
    draws,
    expected_gradient,
    finite_differences,
    outcomes,
    spiral_goal,
)

PHI = np.array([-0.6, 0.4, 0.3, 0.9, -0.7])
BOTH = (SEARCH, AGGREGATION)


def differences_at(goal, point):
    return finite_differences(lambda theta: goal(theta - THETA + point))


def test_each_model_is_moved_by_its_own_part_of_the_gradient_of_the_goal():
    config = algorithm()  # M = 1/2, K (N2 - 1) = 2: see test_whole_gradient.py
    episodes = list(outcomes(config, draws(config), phi=PHI))
    theta = -expected_gradient(config, episodes, THETA, model=SEARCH)
    phi = -expected_gradient(config, episodes, PHI, model=AGGREGATION)
    of_theta = differences_at(lambda theta: spiral_goal(theta, PHI), THETA)
    of_phi = differences_at(lambda phi: spiral_goal(THETA, phi), PHI)
    np.testing.assert_allclose(theta, of_theta / 2, rtol=0, atol=1e-9)
    np.testing.assert_allclose(phi, 2 * of_phi, rtol=0, atol=1e-9)
    with_itself = differences_at(lambda theta: spiral_goal(theta, THETA), THETA)
    assert np.abs(of_theta - with_itself).max() > 1e-2, "theta's gradient depends on who aggregates"


@pytest.mark.parametrize(("frozen", "trained"), [(SEARCH, AGGREGATION), (AGGREGATION, SEARCH)])
def test_a_frozen_model_gets_no_credit_and_the_other_keeps_its_own(frozen, trained):
    config = algorithm()
    one_draw = draws(config)[:1]
    objective, whole = make_objective(config, frozen), make_objective(config)
    assert objective.components == (trained,)
    assert objective.gradient_scales() == {trained: whole.gradient_scales()[trained]}
    alone = 0
    for _, episode, _ in outcomes(config, one_draw):
        whole.assign_credit(episode)
        before = [(trace.advantage, trace.effective) for trace in episode.traces()]
        objective.assign_credit(episode)
        for trace, (advantage, _) in zip(episode.traces(), before, strict=True):
            assert trace.advantage == (advantage if trace.component == trained else 0.0)
        alone += any(effective for _, effective in before) and not episode.effective()
    assert alone, "an episode of which only the frozen model would learn is not effective"


def test_phi_writes_the_answers_of_every_level():
    options = {"levels": [{"set_size": 2, "num_sets": 4}, {"set_size": 2, "num_sets": 3}]}
    components = make_objective(
        algorithm(objective="recursive", options=options, search_traces=8)
    ).components
    assert len(components) == 3
    assert [model_for(each, BOTH) for each in components] == [SEARCH, AGGREGATION, AGGREGATION]
