"""Estimators over n samples of a problem of what k of them would give, and intervals over problems. Pure functions.

All are exact expectations over the k-subsets of the n samples (U-statistics), hence unbiased for k fresh samples and
of the least variance among unbiased estimators that look at the samples alone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

MOST_SAMPLES = 1000  # binomials of more would leave float64
RESAMPLES = 2000


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that k of `samples` samples, drawn without replacement, hold one of the `right` ones.

    1 - C(n-c, k) / C(n, k) as a product, after Chen et al. (2021), equation 1.
    """
    _check_k(samples, k)
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - right + 1, samples + 1))


def best_of_k(scores: Sequence[float], k: int) -> float:
    """Expected largest score of k of the samples: what an oracle that picks the best gets.

    With scores 0 and 1 this is pass@k. The i-th smallest of n is the largest of C(i-1, k-1) of the C(n, k) subsets.
    """
    _check_k(len(scores), k)
    total = math.comb(len(scores), k)
    ranked = enumerate(sorted(scores))
    return math.fsum(score * (math.comb(i, k - 1) / total) for i, score in ranked)


def majority_of_k(groups: Sequence[Hashable | None], scores: Sequence[float], ks: Sequence[int]) -> list[float]:
    """Expected score of the majority answer of k samples, for each k of `ks`.

    groups[i] names the answer of sample i, equal for answers that count as the same; None: it has no answer and no
    vote. A group's score is the mean of its samples' `scores`. Groups tied for the most votes win with equal
    probability (the expected score is their mean), so the order of the samples has no influence. Without any vote the
    score is 0.
    """
    if len(groups) != len(scores):
        raise ValueError(f"{len(groups)} groups but {len(scores)} scores: give one of each a sample")
    if len(groups) > MOST_SAMPLES:
        raise ValueError(f"{len(groups)} samples: majority_of_k is exact up to {MOST_SAMPLES}")
    for k in ks:
        _check_k(len(groups), k)
    members: dict[Hashable, list[float]] = {}
    for group, score in zip(groups, scores, strict=True):
        if group is not None:
            members.setdefault(group, []).append(score)
    counts = [len(each) for each in members.values()]
    means = [math.fsum(each) / len(each) for each in members.values()]
    silent = len(groups) - sum(counts)
    expected = np.zeros(len(groups) + 1)
    for most in range(1, max(counts, default=0) + 1):
        expected += _won_with(most, counts, means, silent, len(groups))
    return [float(expected[k]) / math.comb(len(groups), k) for k in ks]


def _won_with(most: int, counts: list[int], means: list[float], silent: int, samples: int) -> np.ndarray:
    """[samples + 1]: sum over the k-subsets whose largest vote is `most` of the tied groups' mean score, for every k.

    ways[t, k] counts the subsets of k of the groups so far in which t groups have `most` votes and none has more;
    worth[t, k] sums over them the scores of these t groups.
    """
    tied = min(sum(count >= most for count in counts), samples // most)
    ways, worth = np.zeros((tied + 1, samples + 1)), np.zeros((tied + 1, samples + 1))
    ways[0, : silent + 1] = [math.comb(silent, j) for j in range(silent + 1)]
    for count, mean in zip(counts, means, strict=True):
        new_ways, new_worth = np.zeros_like(ways), np.zeros_like(worth)
        for votes in range(min(count, most) + 1):
            choices = math.comb(count, votes)
            add_ways, add_worth = choices * _shift(ways, votes), choices * _shift(worth, votes)
            if votes < most:
                new_ways += add_ways
                new_worth += add_worth
            else:
                new_ways[1:] += add_ways[:-1]
                new_worth[1:] += add_worth[:-1] + mean * add_ways[:-1]
        ways, worth = new_ways, new_worth
    total: np.ndarray = (worth[1:] / np.arange(1, tied + 1)[:, None]).sum(axis=0)
    return total


def _shift(table: np.ndarray, by: int) -> np.ndarray:
    """The table with `by` more samples in every subset."""
    moved = np.zeros_like(table)
    moved[:, by:] = table[:, : table.shape[1] - by]
    return moved


def bootstrap_interval(
    values: Sequence[float], seed: int, *, level: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Percentile interval of the mean of `values` (one a problem), resampling problems with replacement.

    It covers which problems were drawn and, as each value is one draw, the sampling of traces for them too. The same
    seed and number of problems resample alike, so intervals of differences are those of paired comparisons.
    """
    if not values:
        raise ValueError("there are no values to resample")
    rng = np.random.default_rng(seed)
    array = np.asarray(values, dtype=np.float64)
    means = [array[rng.integers(len(array), size=len(array))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_difference(ours: Sequence[float], theirs: Sequence[float], seed: int) -> tuple[float, float, float]:
    """Mean of ours - theirs over the same problems in the same order, and its bootstrap interval."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    return (math.fsum(differences) / len(differences), *bootstrap_interval(differences, seed))


def crossed_interval(
    values: Sequence[Sequence[float]], seed: int, *, level: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Percentile interval of the mean of `values`, [runs, problems]: both are resampled with replacement, on their own.

    It covers which runs (training seeds) and which problems were drawn, and the sampling of traces (the pigeonhole
    bootstrap, Owen 2007). With a few runs it is coarse: look at each of them too. Raises ValueError for ragged or empty
    values.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"values have the shape {array.shape}: give a row a run, with a number for each problem")
    rng = np.random.default_rng(seed)
    runs, problems = array.shape
    means = [
        array[rng.integers(runs, size=runs)].mean(axis=0)[rng.integers(problems, size=problems)].mean()
        for _ in range(resamples)
    ]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _check_k(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k} with {samples} samples: it must be between 1 and their number")
