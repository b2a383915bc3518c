"""Estimate from n samples of a problem what k samples would give: pass@k, best of k, majority of k.

All are exact expectations over the k-subsets of the n samples (U-statistics), hence unbiased for k
new samples, and of the least variance among unbiased estimators that use only the samples.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

MAX_SAMPLES = 1000  # with more, binomial coefficients exceed float64


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the probability that k of the samples, drawn without replacement, hold a right one.

    1 - C(n-c, k) / C(n, k), with n = `samples` and c = `right`, as a product; Chen et al. (2021),
    equation 1.
    """
    _check_k(samples, k)
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - right + 1, samples + 1))


def best_of_k(scores: Sequence[float], k: int) -> float:
    """Return the expected largest score of k of the samples: what an oracle gets.

    With scores 0 and 1 this is pass@k. The i-th smallest of n is the largest of C(i-1, k-1) of the
    C(n, k) subsets.
    """
    _check_k(len(scores), k)
    total = math.comb(len(scores), k)
    ranked = enumerate(sorted(scores))
    return math.fsum(score * (math.comb(i, k - 1) / total) for i, score in ranked)


def majority_of_k(
    groups: Sequence[Hashable | None], scores: Sequence[float], ks: Sequence[int]
) -> list[float]:
    """Return the expected score of the majority answer of k samples, for each k of `ks`.

    groups[i] is the answer group of sample i, equal for answers that count as the same; None is a
    sample without an answer, which has no vote. A group's score is the mean of its samples'
    `scores`. Groups tied for the most votes win with equal probability (the expected score is their
    mean), so the order of the samples has no influence. Without any vote the score is 0.
    """
    if len(groups) != len(scores):
        raise ValueError(
            f"{len(groups)} groups but {len(scores)} scores: give one of each for every sample"
        )
    if len(groups) > MAX_SAMPLES:
        raise ValueError(f"{len(groups)} samples: majority_of_k is exact up to {MAX_SAMPLES}")
    for k in ks:
        _check_k(len(groups), k)
    members: dict[Hashable, list[float]] = {}
    for group, score in zip(groups, scores, strict=True):
        if group is not None:
            members.setdefault(group, []).append(score)
    counts = [len(each) for each in members.values()]
    means = [math.fsum(each) / len(each) for each in members.values()]
    without_answer = len(groups) - sum(counts)
    expected = np.zeros(len(groups) + 1)
    for votes in range(1, max(counts, default=0) + 1):
        expected += _expected_when_winner_has(votes, counts, means, without_answer, len(groups))
    return [float(expected[k]) / math.comb(len(groups), k) for k in ks]


def _expected_when_winner_has(
    most: int, counts: list[int], means: list[float], without_answer: int, samples: int
) -> np.ndarray:
    """Sum, over the k-subsets whose largest vote is `most`, the mean score of the tied groups.

    Returns [samples + 1], one sum for every k. `counts` and `means` hold the samples and the score
    of each group.

    Groups are added one by one: ways[t, k] counts the k-subsets of the groups so far in which t
    groups have `most` votes and none has more; worth[t, k] sums over those subsets the scores of
    the t groups.
    """
    tied = min(sum(count >= most for count in counts), samples // most)
    ways = np.zeros((tied + 1, samples + 1))
    worth = np.zeros_like(ways)
    ways[0, : without_answer + 1] = [
        math.comb(without_answer, j) for j in range(without_answer + 1)
    ]
    for count, mean in zip(counts, means, strict=True):
        new_ways, new_worth = np.zeros_like(ways), np.zeros_like(worth)
        for votes in range(min(count, most) + 1):
            choices = math.comb(count, votes)
            add_ways = choices * _shift(ways, votes)
            add_worth = choices * _shift(worth, votes)
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
    """Return the table with `by` more samples in every subset."""
    moved = np.zeros_like(table)
    moved[:, by:] = table[:, : table.shape[1] - by]
    return moved


def _check_k(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(
            f"k is {k} with {samples} samples: choose a k between 1 and the number of samples"
        )
