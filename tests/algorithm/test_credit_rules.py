"""Credit against hand-made vectors, exact fractions, and the identities that it must satisfy."""

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_mega.algorithm.advantages import (
    aggregation_advantages,
    group_advantages,
    marginal_set_advantages,
    set_scores,
    spiral_advantages,
)
from spiral_mega.algorithm.length_gate import gate_advantages
from spiral_mega.algorithm.sets import coverage_probability, gradient_scale, sample_sets

VECTORS = json.loads((Path(__file__).parent / "vectors" / "credit.json").read_text())


@pytest.mark.parametrize("vector", VECTORS)
def test_vectors(vector):
    n_traces, size, sets = vector["num_traces"], vector["set_size"], vector["sets"]
    search, aggregation = spiral_advantages(sets, vector["aggregation_rewards"], n_traces)
    np.testing.assert_allclose(search, vector["search_advantages"], rtol=0, atol=1e-14)
    np.testing.assert_allclose(aggregation, vector["aggregation_advantages"], rtol=0, atol=1e-14)
    gated = gate_advantages(search, vector["search_lengths"], vector["target_length"])
    np.testing.assert_allclose(gated, vector["gated_search_advantages"], rtol=0, atol=1e-14)
    for method in vector["coverage"]:
        design = (n_traces, size, len(sets), method)
        assert coverage_probability(*design) == pytest.approx(vector["coverage"][method], rel=1e-15)
        assert gradient_scale(*design) == pytest.approx(vector["gradient_scale"][method], rel=1e-15)


@st.composite
def problems(draw):
    """Sets of a drawn design, and rewards in eighths, which float64 holds exactly."""
    n_traces = draw(st.integers(2, 7))
    size = draw(st.integers(1, n_traces))
    method = draw(st.sampled_from(["uniform", "ordered"]))
    population = math.perm(n_traces, size) if method == "ordered" else math.comb(n_traces, size)
    k = draw(st.integers(1, min(5, population)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sets = sample_sets(n_traces, size, k, rng=rng, method=method)
    per_set = draw(st.integers(1, 4))
    rewards = draw(
        st.lists(
            st.lists(st.integers(-80, 80), min_size=per_set, max_size=per_set),
            min_size=k,
            max_size=k,
        )
    )
    return n_traces, sets, np.array(rewards) / 8, rng


@given(problems())
@settings(max_examples=200, deadline=None)
def test_credit_equals_the_definition_in_fractions(problem):
    n_traces, sets, rewards, _ = problem
    exact = [[Fraction(float(reward)) for reward in row] for row in rewards]
    scores = [sum(row) / len(row) for row in exact]
    baseline = sum(scores) / len(scores)
    search, aggregation = spiral_advantages(sets, rewards, n_traces)
    for trace in range(n_traces):
        held = [
            score - baseline for score, chosen in zip(scores, sets, strict=True) if trace in chosen
        ]
        assert search[trace] == pytest.approx(
            float(sum(held) / len(held)) if held else 0.0, abs=1e-12
        )
    for row, score, given_credit in zip(exact, scores, aggregation, strict=True):
        assert given_credit == pytest.approx([float(reward - score) for reward in row], abs=1e-12)


@given(problems())
@settings(max_examples=100, deadline=None)
def test_search_credit_weighted_by_memberships_sums_to_zero(problem):
    n_traces, sets, rewards, _ = problem
    search, aggregation = spiral_advantages(sets, rewards, n_traces)
    times = np.array([sum(trace in chosen for chosen in sets) for trace in range(n_traces)])
    assert times @ search == pytest.approx(0, abs=1e-11)
    assert aggregation.sum(axis=1) == pytest.approx(np.zeros(len(sets)), abs=1e-11)


@given(problems())
@settings(max_examples=100, deadline=None)
def test_renaming_traces_renames_their_credit_and_reordering_sets_changes_nothing(problem):
    n_traces, sets, rewards, rng = problem
    search, aggregation = spiral_advantages(sets, rewards, n_traces)
    names, order = rng.permutation(n_traces), rng.permutation(len(sets))
    renamed = [tuple(int(names[trace]) for trace in sets[i]) for i in order]
    search_again, aggregation_again = spiral_advantages(renamed, rewards[order], n_traces)
    np.testing.assert_allclose(search_again[names], search, atol=1e-12)
    np.testing.assert_array_equal(aggregation_again, aggregation[order])


@given(problems(), st.floats(-100, 100), st.floats(0.01, 100))
@settings(max_examples=100, deadline=None)
def test_credit_ignores_a_constant_in_the_reward_and_scales_with_it(problem, shift, scale):
    n_traces, sets, rewards, _ = problem
    plain = spiral_advantages(sets, rewards, n_traces)
    moved = spiral_advantages(sets, rewards * scale + shift, n_traces)
    for before, after in zip(plain, moved, strict=True):
        np.testing.assert_allclose(after, before * scale, atol=1e-9)


rewards_lists = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12)


@given(rewards_lists)
def test_group_credit_sums_to_zero(rewards):
    assert group_advantages(rewards).sum() == pytest.approx(0, abs=1e-8)


@given(st.lists(st.integers(-100, 100), min_size=2, max_size=12), st.integers(-300, 300))
def test_normalized_group_credit_has_unit_spread_at_any_scale(rewards, exponent):
    credit = group_advantages(np.array(rewards) * 10.0**exponent, normalize_std=True)
    if len(set(rewards)) == 1:
        assert not credit.any()
    else:
        assert credit.mean() == pytest.approx(0, abs=1e-9)
        assert (credit**2).mean() == pytest.approx(1)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 1 / 3, 1e-300, -7.7])
@pytest.mark.parametrize("normalize", [False, True])
def test_equal_rewards_give_exactly_no_credit(value, normalize):
    for count in range(1, 12):
        assert not group_advantages([value] * count, normalize).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: set_scores([1.0, 0.0]), r"rewards has shape \(2,\): it must have 2 dimension"),
        (
            lambda: set_scores([[1.0], [0.0, 1.0]]),
            r"rewards must be numbers in rows of equal length",
        ),
        (lambda: set_scores(np.zeros((0, 3))), r"rewards has shape \(0, 3\)"),
        (lambda: aggregation_advantages([[1.0, float("nan")]]), r"rewards holds nan at \[0, 1\]"),
        (lambda: group_advantages([0.0, float("inf")]), r"rewards holds inf at \[1\]"),
        (lambda: group_advantages([]), r"rewards has shape \(0,\)"),
        (lambda: marginal_set_advantages([(0, 1)], [1.0, 2.0], 2), r"1 sets and 2 scores"),
        (
            lambda: marginal_set_advantages([(0, 2)], [1.0], 2),
            r"set \(0, 2\) must hold distinct traces of 0..1",
        ),
        (lambda: marginal_set_advantages([(0, -1)], [1.0], 2), r"set \(0, -1\)"),
        (lambda: marginal_set_advantages([(1, 1)], [1.0], 2), r"set \(1, 1\)"),
        (lambda: marginal_set_advantages([()], [1.0], 2), r"set \(\)"),
        (lambda: gate_advantages([1.0], [1, 2], 3), r"shape \(1,\) and lengths \(2,\)"),
    ],
)
def test_malformed_inputs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("advantage", "length", "target", "expected"),
    [
        (0.5, 9, 10, 0.5),
        (0.5, 10, 10, 0.5),
        (0.5, 11, 10, 0.0),
        (-0.5, 11, 10, -0.5),
        (0.0, 11, 10, 0.0),
        (1e-300, 11, 10, 0.0),
        (0.5, 10**9, None, 0.5),
    ],
)
def test_length_gate_takes_only_positive_credit_beyond_the_target(
    advantage, length, target, expected
):
    given_credit = np.array([advantage, -1.0])
    assert gate_advantages(given_credit, [length, 1], target).tolist() == [expected, -1.0]
    # The result is the caller's own, gate or none.
    gate_advantages(given_credit, [length, 1], target)[:] = 7
    assert given_credit.tolist() == [advantage, -1.0]


def test_length_gate_works_on_groups():
    gated = gate_advantages([[1.0, -1.0], [2.0, -2.0]], [[5, 5], [4, 4]], 4)
    assert gated.tolist() == [[0.0, -1.0], [2.0, -2.0]]
