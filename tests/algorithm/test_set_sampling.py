"""The sampler's own law, against enumerated populations, and the design's constants against counted ones."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spiral_mega.algorithm.sets import (
    SetDesign,
    check_design,
    coverage_probability,
    gradient_scale,
    sample_sets,
    shuffle_members,
)

METHODS = ["uniform", "ordered", "balanced"]


def assert_uniform(counts: Counter, outcomes: set, draws: int) -> None:
    """Pearson's statistic within five standard deviations of its mean, and no outcome outside the population."""
    assert set(counts) <= outcomes
    expected = draws / len(outcomes)
    statistic = sum((counts[outcome] - expected) ** 2 / expected for outcome in outcomes)
    freedom = len(outcomes) - 1
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


def draw_counts(n_traces: int, size: int, k: int, method: SetDesign, draws: int) -> Counter:
    rng = np.random.default_rng(7)
    return Counter(
        tuple(sample_sets(n_traces, size, k, rng=rng, method=method)) for _ in range(draws)
    )


@pytest.mark.parametrize("method", ["uniform", "ordered"])
@pytest.mark.parametrize(("n_traces", "size", "k"), [(4, 2, 2), (3, 2, 3), (5, 1, 2), (4, 3, 3)])
def test_every_sequence_of_distinct_sets_is_equally_likely(method, n_traces, size, k):
    build = itertools.permutations if method == "ordered" else itertools.combinations
    outcomes = set(itertools.permutations(build(range(n_traces), size), k))
    draws = max(4000, 5 * len(outcomes))
    assert_uniform(draw_counts(n_traces, size, k, method, draws), outcomes, draws)


def partitions(n_traces: int, size: int) -> set[frozenset]:
    cut = range(0, n_traces, size)
    orders = itertools.permutations(range(n_traces))
    return {frozenset(tuple(sorted(order[i : i + size])) for i in cut) for order in orders}


@pytest.mark.parametrize(
    ("n_traces", "size", "rounds"), [(4, 2, 1), (4, 2, 2), (6, 2, 1), (6, 3, 2), (6, 2, 2)]
)
def test_balanced_draws_every_collection_of_distinct_partitions_equally_often(
    n_traces, size, rounds
):
    whole = itertools.combinations(partitions(n_traces, size), rounds)
    # Two partitions without a common set: every first one leaves equally many, so all pairs are equally likely.
    outcomes = {
        frozenset.union(*chosen) for chosen in whole if rounds != 2 or not chosen[0] & chosen[1]
    }
    k = rounds * n_traces // size
    draws = 4000
    counts = Counter()
    for sets, times in draw_counts(n_traces, size, k, "balanced", draws).items():
        counts[frozenset(sets)] += times
    assert_uniform(counts, outcomes, draws)


def test_balanced_law_does_not_change_when_traces_are_renamed():
    # Three rounds of six traces: the law over collections need not be uniform, but must be the same in each orbit.
    draws = 6000
    counts = Counter()
    for sets, times in draw_counts(6, 2, 9, "balanced", draws).items():
        counts[frozenset(map(frozenset, sets))] += times

    def renamed(collection, names):
        return frozenset(frozenset(names[trace] for trace in chosen) for chosen in collection)

    left = set(counts)
    while left:
        first = next(iter(left))
        orbit = {renamed(first, names) for names in itertools.permutations(range(6))}
        mass = sum(counts[member] for member in orbit)
        expected = mass / len(orbit)
        statistic = sum((counts[member] - expected) ** 2 / expected for member in orbit)
        assert abs(statistic - (len(orbit) - 1)) < 5 * math.sqrt(2 * len(orbit))
        left -= orbit


def test_random_order_is_any_order_of_each_set_alike_and_of_the_same_sets():
    rng = np.random.default_rng(7)
    sets = [(0, 2, 5), (1, 2, 3)]
    listings = [tuple(shuffle_members(sets, rng=rng)) for _ in range(7200)]
    alike = itertools.product(*(itertools.permutations(members) for members in sets))
    assert_uniform(Counter(listings), set(alike), len(listings))
    assert all(type(trace) is int for members in listings[0] for trace in members)


def valid_designs():
    return st.tuples(
        st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.sampled_from(METHODS)
    )


@given(valid_designs(), st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_sets_are_distinct_and_well_formed(design, seed):
    n_traces, size, k, method = design
    try:
        check_design(*design)
    except ValueError:
        with pytest.raises(ValueError, match=r"^(num_sets|set_size) is"):
            sample_sets(n_traces, size, k, rng=np.random.default_rng(seed), method=method)
        return
    sets = sample_sets(n_traces, size, k, rng=np.random.default_rng(seed), method=method)
    assert len(sets) == len(set(sets)) == k
    for chosen in sets:
        assert len(set(chosen)) == size
        assert set(chosen) <= set(range(n_traces))
        assert method == "ordered" or list(chosen) == sorted(chosen)
        assert all(type(trace) is int for trace in chosen)
    if method == "balanced":
        times = Counter(trace for chosen in sets for trace in chosen)
        assert set(times.values()) == {k * size // n_traces}
        assert len(times) == n_traces


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n_traces", "size"), [(4, 2), (6, 2), (6, 3), (3, 3), (6, 1)])
def test_asking_for_all_sets_gives_all_sets(method, n_traces, size):
    build = itertools.permutations if method == "ordered" else itertools.combinations
    population = set(build(range(n_traces), size))
    sets = sample_sets(n_traces, size, len(population), rng=np.random.default_rng(0), method=method)
    assert len(sets) == len(population)
    assert set(sets) == population


@pytest.mark.parametrize("method", METHODS)
def test_large_pools_are_sampled_evenly(method):
    # 64 traces have 4e9 sets of 8 and 2e14 arrangements: nothing may be enumerated.
    rng = np.random.default_rng(3)
    times = Counter()
    for _ in range(50):
        for chosen in sample_sets(64, 8, 64, rng=rng, method=method):
            times.update(chosen)
    expected = 50 * 64 * 8 / 64
    assert all(abs(times[trace] - expected) < 5 * math.sqrt(expected) for trace in range(64))


@pytest.mark.parametrize("method", ["uniform", "ordered"])
def test_populations_beyond_64_bits_are_sampled_evenly(method):
    rng = np.random.default_rng(4)
    assert math.comb(200, 100) > 2**190
    sets = sample_sets(200, 100, 200, rng=rng, method=method)
    times = Counter(trace for chosen in sets for trace in chosen)
    assert all(abs(times[trace] - 100) < 5 * math.sqrt(50) for trace in range(200))
    first = Counter(chosen[0] for chosen in sets)
    if method == "ordered":
        assert len(first) > 100
    else:
        assert abs(first[0] - 100) < 5 * math.sqrt(50)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_sets(method):
    first, again = (
        sample_sets(8, 4, 4, rng=np.random.default_rng(11), method=method) for _ in range(2)
    )
    assert first == again


@pytest.mark.parametrize(
    "design", [(4, 2, 1), (4, 2, 2), (4, 2, 4), (5, 3, 2), (4, 1, 3), (3, 3, 1), (5, 4, 2)]
)
@pytest.mark.parametrize("method", ["uniform", "ordered"])
def test_coverage_and_scale_equal_counted_ones(design, method):
    n_traces, size, k = design
    build = itertools.permutations if method == "ordered" else itertools.combinations
    population = list(build(range(n_traces), size))
    held = total = 0
    for drawn in itertools.combinations(population, k):
        total += 1
        held += any(0 in chosen for chosen in drawn)
    q = Fraction(held, total)
    assert coverage_probability(*design, method) == float(q)
    assert gradient_scale(*design, method) == float(Fraction(n_traces, size) * q - 1)


def test_constants_of_the_papers_shape():
    assert coverage_probability(8, 4, 4) == pytest.approx(
        1 - 35 * 34 * 33 * 32 / (70 * 69 * 68 * 67), rel=1e-15
    )
    assert gradient_scale(8, 4, 4) == pytest.approx(0.8857884490590525, rel=1e-15)
    assert (coverage_probability(8, 4, 4, "balanced"), gradient_scale(8, 4, 4, "balanced")) == (
        1.0,
        1.0,
    )


def test_constants_of_huge_designs_neither_overflow_nor_lose_digits():
    # Falling factorials in logarithms: an independent route, good to about 1e-13 here.
    for method, total, without in [
        ("uniform", math.comb(64, 8), math.comb(63, 8)),
        ("ordered", math.perm(64, 8), math.perm(63, 8)),
    ]:
        for k in (1, 2, 64, 1000):
            missing = math.exp(math.fsum(math.log((without - i) / (total - i)) for i in range(k)))
            assert coverage_probability(64, 8, k, method) == pytest.approx(1 - missing, rel=1e-11)
    assert gradient_scale(64, 8, 1, "ordered") == 0.0
    assert gradient_scale(200, 100, 50) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("design", "message"),
    [
        ((4, 5, 1, "uniform"), r"set_size is 5, more than the 4 search traces"),
        (
            (4, 2, 7, "uniform"),
            r"num_sets is 7, but 4 search traces have only 6 distinct uniform sets of 2",
        ),
        ((4, 2, 13, "ordered"), r"only 12 distinct ordered sets"),
        ((4, 2, 8, "balanced"), r"only 6 distinct balanced sets"),
        ((5, 2, 2, "balanced"), r"set_size is 2, which does not divide the 5"),
        ((8, 4, 3, "balanced"), r"num_sets is 3, not a multiple of 2.*use num_sets = 2"),
        ((8, 2, 2, "balanced"), r"not a multiple of 4.*use num_sets = 4"),
        ((12, 4, 492, "balanced"), r"num_sets is 492, nearly all 495 sets"),
        ((4, 2, 0, "uniform"), r"num_sets is 0: it must be at least 1"),
        ((0, 2, 1, "uniform"), r"num_traces is 0"),
        ((4, -1, 1, "uniform"), r"set_size is -1"),
        ((4, 2, 1, "random"), r"'random' is unknown: use one of uniform, ordered, balanced"),
    ],
)
def test_impossible_designs_are_refused_with_the_value_and_the_remedy(design, message):
    for refuse in (check_design, coverage_probability, gradient_scale):
        with pytest.raises(ValueError, match=message):
            refuse(*design)


def test_every_accepted_balanced_design_can_be_drawn():
    for n_traces in range(1, 13):
        for size in (d for d in range(1, n_traces + 1) if n_traces % d == 0):
            per, population = n_traces // size, math.comb(n_traces, size)
            accepted = []
            for k in range(per, population + 1, per):
                try:
                    check_design(n_traces, size, k, "balanced")
                    accepted.append(k)
                except ValueError:
                    pass
            for k in accepted[-2:]:
                sets = sample_sets(
                    n_traces, size, k, rng=np.random.default_rng(k), method="balanced"
                )
                assert len(set(sets)) == k
