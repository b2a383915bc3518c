"""Several set sizes and several levels: whose credit is the gradient of what, by enumeration and by coefficients."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.traces import AGGREGATION, SEARCH
from tests.algorithm.tiny_policy import (
    RESPONSES,
    THETA,
    algorithm,
    drawn_sets,
    draws,
    expectation,
    expected_gradient,
    finite_differences,
    mean_reward,
    outcomes,
    probability,
    spiral_goal,
)


def sizes_config(sizes, per_problem, **changes):
    options = {"sizes": sizes, "sizes_per_problem": per_problem}
    return algorithm(
        objective="set_sizes", options=options, component_weights="unbiased", **changes
    )


def laws_of_sizes(config, sizes, per_problem):
    """(probability, sets): every choice of sizes, and for each the law of the design."""
    choices = list(itertools.combinations(sizes, per_problem))
    for chosen in choices:
        designs = [draws(config.model_copy(update={"set_size": size})) for size in chosen]
        for parts in itertools.product(*designs):
            yield (
                math.prod(p for p, _ in parts) / len(choices),
                tuple(s for _, sets in parts for s in sets),
            )


def test_one_size_a_problem_gives_the_gradient_of_the_sum_over_all_sizes():
    config = sizes_config([1, 2], 1)
    truth = finite_differences(
        lambda theta: spiral_goal(theta, theta, 1) + spiral_goal(theta, theta, 2)
    )
    gradient = expected_gradient(config, outcomes(config, laws_of_sizes(config, [1, 2], 1)))
    np.testing.assert_allclose(-gradient, truth, rtol=0, atol=1e-9)


def test_all_sizes_at_once_give_search_the_same_gradient():
    """Of search alone: with one answer a set there is no aggregation credit, and few enough outcomes to enumerate.
    One of the three draws of single traces stands for all: renaming the traces takes it to the others."""
    config = sizes_config([1, 2], 2, aggregation_traces=1).model_copy(
        update={"component_weights": "paper"}
    )
    truth = finite_differences(
        lambda theta: spiral_goal(theta, THETA, 1) + spiral_goal(theta, THETA, 2)
    )
    laws = [
        (3 * chance, sets)
        for chance, sets in laws_of_sizes(config, [1, 2], 2)
        if sets[:2] == ((0,), (1,))
    ]
    assert sum(chance for chance, _ in laws) == pytest.approx(1)
    gradient = expected_gradient(config, outcomes(config, laws))
    np.testing.assert_allclose(-gradient, truth, rtol=0, atol=1e-9)


def test_a_size_is_compared_with_its_own_kind():
    """Aggregation of more traces scores better, and no trace is to blame or to thank for that."""
    config = sizes_config([1, 3], None, search_traces=4)
    objective = make_objective(config)
    _, episode, _ = next(
        outcomes(config, [(1.0, drawn_sets(objective.plan, np.random.default_rng(0)))])
    )
    for members, group in zip(episode.sets, episode.aggregation, strict=True):
        for trace in group:
            trace.reward = float(len(members))
    objective.assign_credit(episode)
    assert not episode.effective()


def test_sizes_are_drawn_alike_and_cost_what_was_asked():
    plan = make_objective(sizes_config([1, 2, 4], 2, search_traces=5, num_sets=3)).plan
    rng = np.random.default_rng(0)
    seen = Counter()
    for _ in range(3000):
        sets = drawn_sets(plan, rng)
        counts = Counter(map(len, sets))
        assert set(counts.values()) == {3}
        assert len(set(sets)) == len(sets) == 6
        seen[tuple(sorted(counts))] += 1
    assert set(seen) == {(1, 2), (1, 4), (2, 4)}
    assert (
        sum((count - 1000) ** 2 / 1000 for count in seen.values()) < 13.8
    )  # chi-squared, 2 degrees, p = 0.001


@pytest.mark.parametrize(
    ("sizes", "per_problem", "message"),
    [
        ([3], None, r"sizes holds 3, which gives the 3 search traces no credit \(M is 0\)"),
        ([1, 4], None, r"set_size is 4, more than the 3 search traces"),
        ([1, 1], None, r"distinct sizes"),
        ([1, 2], 3, r"sizes_per_problem 3"),
        ([0], None, r"options\.sizes\.0.*greater than 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes, per_problem, message):
    options = {"sizes": sizes, "sizes_per_problem": per_problem}
    with pytest.raises(ValueError, match=message):
        make_objective(
            algorithm(objective="set_sizes", options=options, num_sets=1 if sizes == [3] else 2)
        )


def levels_config(levels, rewarded="last", **changes):
    options = {"levels": [{"set_size": n, "num_sets": k} for n, k in levels], "rewarded": rewarded}
    return algorithm(objective="recursive", options=options, **changes)


def test_two_levels_give_the_gradient_of_the_last_answer_to_search_and_to_the_first_answers():
    """Four traces in two pairs, one answer to each, and each answer answered once more: few enough to enumerate. With
    one answer a set the last level has no credit, so its parameters are held."""
    config = levels_config(
        [(2, 2), (1, 2)], search_traces=4, aggregation_traces=1, set_design="balanced"
    )

    def goal(search, first):
        def last(*pair):
            return sum(probability(z, first, pair) * mean_reward(THETA, (z,)) for z in RESPONSES)

        return expectation(last, 2, search)

    truth = finite_differences(lambda theta: goal(theta, theta))
    assert np.abs(truth).min() > 1e-4
    gradient = expected_gradient(config, outcomes(config, [(1.0, ((0, 1), (2, 3), (4,), (5,)))]))
    np.testing.assert_allclose(-gradient, truth, rtol=0, atol=1e-9)


def test_one_level_is_spiral_up_to_the_baseline():
    """Against the sets without the trace in place of all sets: the same comparison, weighted by the share of sets."""
    config = levels_config([(2, 4)], search_traces=4)
    plain = algorithm(search_traces=4, num_sets=4)
    rng = np.random.default_rng(3)
    sets = [(0, 1), (1, 2), (1, 3), (0, 2)]
    _, episode, _ = next(outcomes(config, [(1.0, sets)]))
    for group in episode.aggregation:
        for trace in group:
            trace.reward = rng.normal()
    make_objective(config).assign_credit(episode)
    ours = [trace.advantage for trace in episode.traces()]
    make_objective(plain).assign_credit(episode)
    theirs = [trace.advantage for trace in episode.traces()]
    shares = np.array([2, 3, 2, 1]) / 4
    np.testing.assert_allclose(ours[:4], theirs[:4] * shares / (1 - shares), atol=1e-12)
    np.testing.assert_allclose(ours[4:], theirs[4:], atol=1e-12)


def coefficients(objective, sets):
    """[traces, sets * N2]: how much each reward counts in each trace's credit, which is linear in them."""
    answers = objective.plan.aggregation_traces
    return np.stack(
        [
            objective.advantages(sets, unit.reshape(len(sets), answers))
            for unit in np.eye(len(sets) * answers)
        ],
        axis=1,
    )  # fmt: skip


def descendants(sets, first, answers):
    """By trace: the sets that descend from it, by walking down."""
    found = {}
    for trace in range(first + len(sets) * answers):
        reached, grown = {trace}, True
        while grown:
            shown = {l for l, members in enumerate(sets) if reached & set(members)}
            new = {first + l * answers + i for l in shown for i in range(answers)} - reached
            reached, grown = reached | new, bool(new)
        found[trace] = {l for l, members in enumerate(sets) if reached & set(members)}
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rewarded", ["last", "every"])
def test_credit_is_what_descends_from_a_trace_less_what_it_cannot_have_touched(rewarded, seed):
    """So that it is unbiased for any draw of sets: E[grad log pi(y) A(y)] = E[grad log pi(y) J], since what is
    subtracted does not depend on y given what y was written from. Three levels."""
    config = levels_config(
        [(2, 5), (2, 4), (1, 3)], rewarded, search_traces=7, aggregation_traces=2
    )
    objective = make_objective(config)
    sets = drawn_sets(objective.plan, np.random.default_rng(seed))
    table, found = coefficients(objective, sets), descendants(sets, 7, 2)
    rewarded_levels = (
        [range(5), range(5, 9), range(9, 12)] if rewarded == "every" else [range(9, 12)]
    )
    for trace, row in enumerate(table):
        row = row.reshape(len(sets), 2)
        of_sets = row.copy()
        own = (trace - 7) // 2 if trace >= 7 else None
        last = own is not None and own >= 9
        if own is not None and any(own in level for level in rewarded_levels):
            level = next(level for level in rewarded_levels if own in level)
            expected = np.array([-0.5, -0.5])
            expected[(trace - 7) % 2] = 0.5  # r - mean of two
            np.testing.assert_allclose(
                row[own], expected if last else expected / len(level), atol=1e-12
            )
            of_sets[own] = 0
        for level in rewarded_levels:
            inside = [l for l in level if l in found[trace]]
            outside = [l for l in level if l not in found[trace]]
            for l in level:
                share = (
                    1 / len(level)
                    if l in inside
                    else -len(inside) / len(level) / max(len(outside), 1)
                )
                share = share if outside else 0.0
                np.testing.assert_allclose(of_sets[l], share / 2, atol=1e-12)
            of_sets[list(level)] = 0
        assert not of_sets.any(), "rewards of other levels count for nothing"


@pytest.mark.parametrize("rewarded", ["last", "every"])
def test_every_level_gets_credit(rewarded):
    config = levels_config([(2, 4), (2, 4)], rewarded, search_traces=8, aggregation_traces=4)
    objective = make_objective(config)
    assert objective.components == (SEARCH, AGGREGATION, "aggregation_2")
    rng = np.random.default_rng(0)
    credited = Counter()
    for _ in range(20):
        _, episode, _ = next(outcomes(config, [(1.0, drawn_sets(objective.plan, rng))]))
        for group in episode.aggregation:
            for trace in group:
                trace.reward = float(rng.integers(2))
        objective.assign_credit(episode)
        credited.update(trace.component for trace in episode.traces() if trace.effective)
    assert all(credited[component] > 20 for component in objective.components)
    assert objective.gradient_scales() == {SEARCH: 1, AGGREGATION: 1, "aggregation_2": 12}


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (
            [(2, 2), (4, 2)],
            r"levels\.1, over 4 traces: num_sets is 2, but 4 search traces have only 1",
        ),
        ([(4, 2)], r"levels\.0, over 3 traces: set_size is 4"),
        ([(2, 3), (6, 7)], r"every rewarded set would descend from every search trace"),
        ([(2, 1)], r"algorithm\.options\.levels\.0\.num_sets.*greater than 1"),
    ],
)
def test_levels_that_make_no_sense_are_refused(levels, message):
    with pytest.raises(ValueError, match=message):
        make_objective(levels_config(levels, aggregation_traces=3 if levels[0] == (2, 3) else 2))


def test_answers_of_another_plan_are_refused():
    config = levels_config([(2, 2), (1, 2)])
    _, episode, _ = next(outcomes(algorithm(), draws(algorithm())))
    with pytest.raises(ValueError, match="not those of this plan"):
        make_objective(config).assign_credit(episode)
