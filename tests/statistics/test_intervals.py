"""Intervals against enumeration of all resamples, the normal law, and how often they cover the truth."""

import math
from itertools import product

import numpy as np
import pytest

from spiral_mega.statistics.intervals import (
    bootstrap_interval,
    crossed_interval,
    paired_difference,
    ratio,
)


def test_the_bootstrap_interval_covers_the_mean_about_as_often_as_it_says():
    """Over 300 draws of 60 problems; 95 % means 285, and 270 would be 6 sigma below."""
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(300):
        low, high = bootstrap_interval(
            (rng.random(60) < 0.3).astype(float).tolist(), trial, resamples=400
        )
        covered += low <= 0.3 <= high
    assert 265 <= covered <= 299


def test_the_bootstrap_interval_is_that_of_the_normal_law_for_many_problems():
    values = np.random.default_rng(2).normal(5.0, 2.0, 4000)
    low, high = bootstrap_interval(values.tolist(), 0)
    error = values.std() / math.sqrt(len(values))
    assert (low, high) == pytest.approx(
        (values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.1 * error
    )


def test_a_paired_difference_sees_what_two_intervals_hide():
    hard = np.linspace(0, 1, 200)
    difference, low, high = paired_difference((hard + 0.01).tolist(), hard.tolist(), 0)
    assert difference == pytest.approx(0.01)
    assert 0 < low <= high
    assert (
        bootstrap_interval((hard + 0.01).tolist(), 0)[0] < bootstrap_interval(hard.tolist(), 0)[1]
    )


def every_resample(values):
    """Sorted means of all equally likely resamples of rows and columns."""
    rows, columns = values.shape
    means = [
        values[np.ix_(r, c)].mean()
        for r in product(range(rows), repeat=rows)
        for c in product(range(columns), repeat=columns)
    ]
    return np.sort(means)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_the_crossed_interval_is_that_of_all_resamples_of_seeds_and_problems(level):
    values = np.random.default_rng(1).normal(size=(3, 5)) + np.array([[0.0], [1.0], [3.0]])
    low, high = crossed_interval(values.tolist(), 0, level=level, resamples=20_000)
    truth = every_resample(values)
    for end, share in ((low, (1 - level) / 2), (high, (1 + level) / 2)):
        # so much of the exact distribution lies below the end, up to 4 deviations of a share of 20,000 draws
        spread = 4 * (share * (1 - share) / 20_000) ** 0.5
        assert np.mean(truth < end - 1e-12) <= share + spread
        assert np.mean(truth <= end + 1e-12) >= share - spread


def test_seeds_that_agree_leave_the_interval_over_problems():
    problems = np.random.default_rng(2).random(40)
    crossed = crossed_interval([problems.tolist()] * 3, 0, resamples=20_000)
    alone = bootstrap_interval(problems.tolist(), 1, resamples=20_000)
    assert crossed == pytest.approx(alone, abs=0.01)


@pytest.mark.parametrize("values", [[], [[]], [[1.0, 2.0], [3.0]]])
def test_ragged_or_empty_values_are_refused(values):
    with pytest.raises(ValueError, match=r"shape|inhomogeneous"):
        crossed_interval(values, 0)


def test_a_ratio_is_resampled_by_problem_and_not_by_what_is_counted_in_it():
    """Ten problems of 100 answers that all fall alike: the interval is that of ten draws, not of a thousand."""
    parts, wholes = [100.0] * 5 + [0.0] * 5, [100.0] * 10
    found = ratio(parts, wholes, 0)
    low, high = found["interval"]
    assert found["value"] == 0.5
    assert high - low > 0.5
    assert ratio([0.0], [0.0], 0) is None
