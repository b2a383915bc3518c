"""95 % bootstrap intervals of means, differences and ratios: over problems, or over problems and training seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spiral_mega.seeds import derive_seed

RESAMPLES = 2000


def bootstrap_interval(
    values: Sequence[float], seed: int, *, level: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Compute the percentile interval of the mean of `values`, one a problem.

    Problems are resampled with replacement. The interval covers which problems were drawn and, as
    each value is one draw, the sampling of traces for them too. The same seed and number of
    problems give the same resamples, so intervals of differences are those of paired comparisons.
    """
    if not values:
        raise ValueError("there are no values to resample")
    rng = np.random.default_rng(seed)
    array = np.asarray(values, dtype=np.float64)
    means = [array[rng.integers(len(array), size=len(array))].mean() for _ in range(resamples)]
    return _percentiles(means, level)


def paired_difference(
    ours: Sequence[float], theirs: Sequence[float], seed: int
) -> tuple[float, float, float]:
    """Return the mean of ours - theirs, over the same problems in the same order, and its bootstrap interval."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    low, high = bootstrap_interval(differences, seed)
    return math.fsum(differences) / len(differences), low, high


def crossed_interval(
    values: Sequence[Sequence[float]], seed: int, *, level: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Compute the percentile interval of the mean of `values` [runs, problems].

    Runs and problems are resampled independently. The interval covers which runs (training seeds)
    and which problems were drawn, and the sampling of traces (the pigeonhole bootstrap, Owen 2007).
    With few runs it is coarse: look at each run too. Raises ValueError for ragged or empty values.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or not array.size:
        raise ValueError(
            f"values have the shape {array.shape}: give one row a run, with one number for each problem"
        )
    rng = np.random.default_rng(seed)
    runs, problems = array.shape
    means = []
    for _ in range(resamples):
        by_problem = array[rng.integers(runs, size=runs)].mean(axis=0)
        means.append(by_problem[rng.integers(problems, size=problems)].mean())
    return _percentiles(means, level)


def mean(values: Sequence[float], seed: int) -> dict[str, Any] | None:
    """Return {"value", "interval", "problems"} of the mean of one value a problem; None without values."""
    if not values:
        return None
    low, high = bootstrap_interval(values, derive_seed(seed, "analysis"))
    return {
        "value": math.fsum(values) / len(values),
        "interval": [low, high],
        "problems": len(values),
    }


def ratio(parts: Sequence[float], wholes: Sequence[float], seed: int) -> dict[str, Any] | None:
    """Return the same of sum(parts) / sum(wholes), one of each a problem; None if that sum is 0.

    "of" is sum(wholes). Problems are resampled whole, so that several counts from one problem are
    not taken for independent.
    """
    part, whole = np.asarray(parts, dtype=np.float64), np.asarray(wholes, dtype=np.float64)
    if not whole.sum() > 0:
        return None
    used = whole > 0
    part, whole = part[used], whole[used]
    rng = np.random.default_rng(derive_seed(seed, "analysis"))
    ratios = []
    for _ in range(RESAMPLES):
        chosen = rng.integers(len(whole), size=len(whole))
        ratios.append(part[chosen].sum() / whole[chosen].sum())
    low, high = np.quantile(ratios, [0.025, 0.975])
    return {
        "value": float(part.sum() / whole.sum()),
        "interval": [float(low), float(high)],
        "problems": len(whole),
        "of": float(whole.sum()),
    }


def _percentiles(resampled: Sequence[float], level: float) -> tuple[float, float]:
    """Return the ends of the central interval that holds the share `level` of the resampled values."""
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
