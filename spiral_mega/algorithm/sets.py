"""Draw the sets of search traces that are aggregated; compute the gradient scale of each design.

The marginal set advantage is unbiased up to a factor M (paper, proposition 3.1) for every design
whose law does not change when the traces are renamed. All three designs have that property. It
also holds for set scores that depend on the order of a set: the traces are independent, and the
order of a set does not depend on their content.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

SetDesign = Literal["uniform", "ordered", "balanced"]
SetOrder = Literal["ascending", "random"]

# Balanced sets are drawn by rejection, one partition at a time.
MIN_ACCEPTANCE = 1e-2  # least acceptance rate of the last partition
MAX_TRIES = 2000  # for one partition; then all start again, since this may be a dead end


def sample_sets(
    num_traces: int,
    set_size: int,
    num_sets: int,
    *,
    rng: np.random.Generator,
    method: SetDesign = "uniform",
) -> list[tuple[int, ...]]:
    """Draw K = num_sets distinct sets of n = set_size of the traces 0..N-1, N = num_traces.

    - `uniform`: ascending sets, uniformly without replacement from all C(N, n) (the paper's).
    - `ordered`: tuples, uniformly without replacement from all N!/(N-n)! arrangements.
    - `balanced`: K n/N random partitions of the traces into N/n ascending sets each, so that every
      trace is in K n/N sets. A partition that would repeat a set is drawn again. That does not
      depend on the names of traces, so the law stays exchangeable.

    The order of the list has no meaning, since credit is symmetric in the sets; for `uniform` and
    `ordered` it is itself uniform. Nothing is enumerated, so N and n may be large.

    Raises ValueError as `check_design` does.
    """
    check_design(num_traces, set_size, num_sets, method)
    population = _population(num_traces, set_size, method)
    if method == "balanced" and num_sets < population:
        return _draw_partitions(num_traces, set_size, num_sets, rng)
    unrank = _arrangement if method == "ordered" else _combination
    return [
        unrank(rank, num_traces, set_size) for rank in _distinct_below(population, num_sets, rng)
    ]


def shuffle_members(
    sets: list[tuple[int, ...]], *, rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """Return the same sets, each with its members in a random order of its own."""
    return [tuple(rng.permutation(members).tolist()) for members in sets]


def check_design(
    num_traces: int, set_size: int, num_sets: int, method: SetDesign = "uniform"
) -> None:
    """Raise ValueError, with the value and the remedy, if such sets cannot be drawn."""
    if method not in get_args(SetDesign):
        raise ValueError(
            f"set design {method!r} is unknown: use one of {', '.join(get_args(SetDesign))}"
        )
    for name, value in (("num_traces", num_traces), ("set_size", set_size), ("num_sets", num_sets)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    if set_size > num_traces:
        raise ValueError(
            f"set_size is {set_size}, more than the {num_traces} search traces: "
            "lower set_size or sample more search traces"
        )
    population = _population(num_traces, set_size, method)
    if num_sets > population:
        raise ValueError(
            f"num_sets is {num_sets}, but {num_traces} search traces have only {population} "
            f"distinct {method} sets of {set_size}: use num_sets <= {population} or sample more "
            "search traces"
        )
    if method == "balanced":
        _check_balanced(num_traces, set_size, num_sets, population)


def coverage_probability(
    num_traces: int, set_size: int, num_sets: int, method: SetDesign = "uniform"
) -> float:
    """Return q, the probability that a given trace is in some set; exact up to one rounding.

    q = 1 - C(S', K) / C(S, K), with S sets in all and S' without the trace; 1 for `balanced`.
    """
    return float(_coverage(num_traces, set_size, num_sets, method))


def gradient_scale(
    num_traces: int, set_size: int, num_sets: int, method: SetDesign = "uniform"
) -> float:
    """Return M = (N/n) q - 1 (proposition 3.1); 0 if K = 1 or N = n.

    E[sum_j grad log pi(y_j) A_marg(y_j)] = M grad E[f].
    """
    return float(
        Fraction(num_traces, set_size) * _coverage(num_traces, set_size, num_sets, method) - 1
    )


def _coverage(num_traces: int, set_size: int, num_sets: int, method: SetDesign) -> Fraction:
    check_design(num_traces, set_size, num_sets, method)
    without = _population(num_traces - 1, set_size, method)
    if method == "balanced" or num_sets > without:
        return Fraction(1)
    population = _population(num_traces, set_size, method)
    return 1 - Fraction(math.comb(without, num_sets), math.comb(population, num_sets))


def _population(num_traces: int, set_size: int, method: SetDesign) -> int:
    """Return the number of distinct sets to draw from."""
    return (
        math.perm(num_traces, set_size) if method == "ordered" else math.comb(num_traces, set_size)
    )


def _check_balanced(num_traces: int, set_size: int, num_sets: int, population: int) -> None:
    if num_traces % set_size:
        raise ValueError(
            f"set_size is {set_size}, which does not divide the {num_traces} search traces: the "
            "balanced design needs whole partitions; change set_size or the number of search "
            "traces, or use the uniform design"
        )
    per_partition = num_traces // set_size
    if num_sets % per_partition:
        raise ValueError(
            f"num_sets is {num_sets}, not a multiple of {per_partition}, the sets in one partition "
            f"of {num_traces} search traces: use num_sets = "
            f"{max(1, num_sets // per_partition) * per_partition}, or the uniform design"
        )
    # Disjoint partitions exist up to the whole population (Baranyai); rejection limits their
    # number.
    acceptance = (1 - (num_sets - per_partition) / population) ** per_partition
    if num_sets < population and acceptance < MIN_ACCEPTANCE:
        raise ValueError(
            f"num_sets is {num_sets}, nearly all {population} sets of {set_size} among "
            f"{num_traces} search traces, which is too many to draw in partitions: lower num_sets, "
            f"use all {population}, or the uniform design"
        )


def _draw_partitions(
    num_traces: int, set_size: int, num_sets: int, rng: np.random.Generator
) -> list[tuple[int, ...]]:
    rounds = num_sets * set_size // num_traces
    while True:
        drawn: list[tuple[int, ...]] = []
        for _ in range(rounds):
            drawn += _new_partition(num_traces, set_size, set(drawn), rng)
        if len(drawn) == num_sets:
            return drawn


def _new_partition(
    num_traces: int, set_size: int, taken: set[tuple[int, ...]], rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """Draw a partition that has no set of `taken`; return an empty one if none was found."""
    for _ in range(MAX_TRIES):
        order = rng.permutation(num_traces).tolist()
        partition = [tuple(sorted(order[i : i + set_size])) for i in range(0, num_traces, set_size)]
        if taken.isdisjoint(partition):
            return partition
    return []


def _distinct_below(bound: int, count: int, rng: np.random.Generator) -> list[int]:
    """Draw `count` distinct integers of [0, bound) in random order, with `count` draws (Floyd)."""
    chosen: dict[int, None] = {}
    for last in range(bound - count, bound):
        candidate = _integer_below(last + 1, rng)
        chosen[last if candidate in chosen else candidate] = None
    values = list(chosen)
    return [values[i] for i in rng.permutation(count)]


def _integer_below(bound: int, rng: np.random.Generator) -> int:
    """Draw a uniform integer of [0, bound), of any size; numpy's own are limited to 64 bits."""
    bits = (bound - 1).bit_length()
    size = (bits + 7) // 8
    while True:
        value = int.from_bytes(rng.bytes(size), "little") >> (8 * size - bits)
        if value < bound:
            return value


def _combination(rank: int, num_traces: int, set_size: int) -> tuple[int, ...]:
    """Return the ascending set at `rank` in lexicographic order."""
    chosen: list[int] = []
    for trace in range(num_traces):
        if len(chosen) == set_size:
            break
        num_with_trace = math.comb(num_traces - trace - 1, set_size - len(chosen) - 1)
        if rank < num_with_trace:
            chosen.append(trace)
        else:
            rank -= num_with_trace
    return tuple(chosen)


def _arrangement(rank: int, num_traces: int, set_size: int) -> tuple[int, ...]:
    """Return the ordered tuple whose mixed-radix digits (base N, then N-1, ...) are `rank`."""
    remaining = list(range(num_traces))
    chosen: list[int] = []
    for _ in range(set_size):
        rank, position = divmod(rank, len(remaining))
        chosen.append(remaining.pop(position))
    return tuple(chosen)
