"""Proposition 3.1 by exact enumeration: every outcome of a small policy, every draw of a design, in fractions."""

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest

from spiral_mega.algorithm.advantages import marginal_set_advantages
from spiral_mega.algorithm.sets import gradient_scale

F = Fraction
POLICIES = {2: (F(1, 3), F(2, 3)), 3: (F(1, 2), F(1, 3), F(1, 6))}
Score = Callable[[tuple[int, ...]], Fraction]
Sets = tuple[tuple[int, ...], ...]


def symmetric(values: tuple[int, ...]) -> Fraction:
    """Any function of the multiset, with no structure to help."""
    return F(sum((value + 1) ** 2 for value in values) % 5, 3) + F(len(set(values)), 7)


def by_order(values: tuple[int, ...]) -> Fraction:
    return sum(
        (F(value * value + 1, position + 2) for position, value in enumerate(values)), F(0)
    ) * (1 + values[0])


def score_function(value: int, policy: tuple[Fraction, ...]) -> list[Fraction]:
    """grad log pi(value) with respect to the logits of a softmax."""
    return [(1 if k == value else 0) - p for k, p in enumerate(policy)]


def probability(values: tuple[int, ...], policy: tuple[Fraction, ...]) -> Fraction:
    total = F(1)
    for value in values:
        total *= policy[value]
    return total


def gradient(score: Score, size: int, policy: tuple[Fraction, ...]) -> list[Fraction]:
    """grad E[f(y_1..y_n)], by the product rule over all outcomes."""
    result = [F(0)] * len(policy)
    for values in itertools.product(range(len(policy)), repeat=size):
        weight = probability(values, policy) * score(values)
        for value in values:
            result = [
                r + weight * g for r, g in zip(result, score_function(value, policy), strict=True)
            ]
    return result


def subsets(n_traces: int, size: int, k: int, method: str) -> Iterator[tuple[Fraction, Sets]]:
    build = itertools.permutations if method == "ordered" else itertools.combinations
    drawn = list(itertools.combinations(build(range(n_traces), size), k))
    yield from ((F(1, len(drawn)), sets) for sets in drawn)


def partition_rounds(n_traces: int, size: int, k: int) -> Iterator[tuple[Fraction, Sets]]:
    """Partitions one after the other, each uniform among those that repeat no set; dead ends are left out."""
    cut = range(0, n_traces, size)
    orders = itertools.permutations(range(n_traces))
    all_partitions = sorted(
        {tuple(sorted(tuple(sorted(o[i : i + size])) for i in cut)) for o in orders}
    )
    paths: list[tuple[Fraction, Sets]] = [(F(1), ())]
    for _ in range(k * size // n_traces):
        longer = []
        for weight, sets in paths:
            free = [partition for partition in all_partitions if not set(partition) & set(sets)]
            longer += [(weight / len(free), sets + partition) for partition in free]
        paths = longer
    total = sum(weight for weight, _ in paths)
    yield from ((weight / total, sets) for weight, sets in paths)


def draws(n_traces: int, size: int, k: int, method: str) -> list[tuple[Fraction, Sets]]:
    return list(
        partition_rounds(n_traces, size, k)
        if method == "balanced"
        else subsets(n_traces, size, k, method)
    )


def exact_credit(sets: Sets, scores: list[Fraction], n_traces: int) -> list[Fraction]:
    baseline = sum(scores, F(0)) / len(scores)
    credit = []
    for trace in range(n_traces):
        held = [
            value - baseline for value, chosen in zip(scores, sets, strict=True) if trace in chosen
        ]
        credit.append(sum(held, F(0)) / len(held) if held else F(0))
    return credit


def moments(design: tuple[int, int, int, str], score: Score, policy: tuple[Fraction, ...]):
    """Exact mean [V] and mean squared norm of the estimator, and the mean with the package's float64 credit."""
    n_traces, size, k, method = design
    mean, square, package = [F(0)] * len(policy), F(0), np.zeros(len(policy))
    all_draws = draws(n_traces, size, k, method)
    for values in itertools.product(range(len(policy)), repeat=n_traces):
        weight = probability(values, policy)
        gradients = [score_function(value, policy) for value in values]
        table = {
            chosen: score(tuple(values[t] for t in chosen))
            for chosen in {s for _, sets in all_draws for s in sets}
        }
        as_floats = np.array(gradients, dtype=float)
        for chance, sets in all_draws:
            scores = [table[chosen] for chosen in sets]
            credit = exact_credit(sets, scores, n_traces)
            estimate = [
                sum((c * g[v] for c, g in zip(credit, gradients, strict=True)), F(0))
                for v in range(len(policy))
            ]
            mean = [m + weight * chance * e for m, e in zip(mean, estimate, strict=True)]
            square += weight * chance * sum(e * e for e in estimate)
            floats = marginal_set_advantages(sets, [float(value) for value in scores], n_traces)
            package += float(weight * chance) * (floats @ as_floats)
    return mean, square, package


DESIGNS = [
    (3, 2, 2, "uniform", 3),
    (4, 2, 2, "uniform", 2),
    (4, 2, 4, "uniform", 2),
    (4, 3, 2, "uniform", 3),
    (4, 1, 3, "uniform", 2),
    (4, 2, 1, "uniform", 2),
    (3, 2, 2, "ordered", 3),
    (4, 2, 2, "ordered", 2),
    (3, 2, 5, "ordered", 2),
    (4, 2, 2, "balanced", 3),
    (4, 2, 4, "balanced", 3),
    (4, 2, 6, "balanced", 2),
    (6, 3, 4, "balanced", 2),
    (6, 2, 6, "balanced", 2),
    (4, 1, 4, "balanced", 2),
]


@pytest.mark.parametrize("score", [symmetric, by_order])
@pytest.mark.parametrize("design", DESIGNS)
def test_search_credit_is_the_gradient_times_the_scale(design, score):
    *shape, vocabulary = design
    policy = POLICIES[vocabulary]
    mean, _, package = moments(tuple(shape), score, policy)
    truth = gradient(score, shape[1], policy)
    assert any(truth)
    # The factor is the same fraction in every coordinate, and it is the one that the package states.
    factors = {m / t for m, t in zip(mean, truth, strict=True) if t}
    assert len(factors) == 1
    scale = factors.pop()
    assert mean == [scale * t for t in truth]
    assert gradient_scale(*shape) == float(scale)
    np.testing.assert_allclose(package, [float(m) for m in mean], atol=1e-12)


@pytest.mark.parametrize("score", [symmetric, by_order])
@pytest.mark.parametrize("shape", [(4, 2, 2), (4, 2, 4), (6, 3, 2)])
def test_balanced_sets_have_less_variance_than_uniform_ones(shape, score):
    relative = {}
    for method in ("uniform", "balanced"):
        mean, square, _ = moments((*shape, method), score, POLICIES[2])
        norm = sum(m * m for m in mean)
        # Variance of the estimator divided by its scale: both then estimate the same gradient.
        relative[method] = (square - norm) / norm
    assert relative["balanced"] < relative["uniform"]
