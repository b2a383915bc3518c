"""Means and ratios over problems with their bootstrap intervals, as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spiral_mega.seeds import derive_seed
from spiral_mega.statistics.estimators import RESAMPLES, bootstrap_interval


def mean(values: Sequence[float], seed: int) -> dict[str, Any] | None:
    """{"value", "interval", "problems"} of the mean of one value a problem; None without any."""
    if not values:
        return None
    low, high = bootstrap_interval(values, derive_seed(seed, "analysis"))
    return {"value": math.fsum(values) / len(values), "interval": [low, high], "problems": len(values)}


def ratio(parts: Sequence[float], wholes: Sequence[float], seed: int) -> dict[str, Any] | None:
    """The same of sum(parts) / sum(wholes), with one of each a problem; "of" is the sum of wholes. None where it is 0.

    Problems are resampled whole, so that what is counted several times in one problem is not taken for independent.
    """
    part, whole = np.asarray(parts, dtype=np.float64), np.asarray(wholes, dtype=np.float64)
    if not whole.sum() > 0:
        return None
    used = whole > 0
    part, whole = part[used], whole[used]
    rng = np.random.default_rng(derive_seed(seed, "analysis"))
    drawn = [rng.integers(len(whole), size=len(whole)) for _ in range(RESAMPLES)]
    low, high = np.quantile([part[chosen].sum() / whole[chosen].sum() for chosen in drawn], [0.025, 0.975])
    return {
        "value": float(part.sum() / whole.sum()),
        "interval": [float(low), float(high)],
        "problems": len(whole),
        "of": float(whole.sum()),
    }
