"""What the evaluations say of the paper's findings: pure functions of values by problem and training seed.

Every comparison is of differences, paired by problem and seed, with two 95 % intervals: over problems alone (these
runs, other problems) and over seeds and problems both (`intervals.crossed_interval`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from spiral_mega.statistics.intervals import bootstrap_interval, crossed_interval

Values = np.ndarray  # [seeds, problems]
Measured = Mapping[str, Values]  # by measure, "harness metric x"
Expected = Literal["higher", "similar"]

SEED = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """One claim of the paper: how SPIRAL compares with another arm in a quantity of `of`."""

    claim: str
    quantity: str
    of: Callable[[Measured], Values]
    expected: Expected


def at(measure: str) -> Callable[[Measured], Values]:
    return lambda measured: measured[measure]


def change(after: str, before: str) -> Callable[[Measured], Values]:
    return lambda measured: measured[after] - measured[before]


def findings(ks: Sequence[int], steps: int, budget: int) -> list[Finding]:
    """The paper's findings on test-time compute, for pass@k at `ks`, `steps` of self-aggregation, and the longest
    sequential budget."""
    parallel = [Finding("pass@k: SPIRAL above", f"pass@{k}", at(f"pass_at_k pass {k}"), "higher") for k in ks if k > 1]
    last, first = f"rsa mean {steps}", "rsa mean 0"
    return [
        *parallel,
        Finding("self-aggregation: SPIRAL above", f"accuracy after {steps} steps", at(last), "higher"),
        Finding("self-aggregation: SPIRAL gains more", f"gain over {steps} steps", change(last, first), "higher"),
        Finding("majority: similar", f"majority of {max(ks)}", at(f"majority majority {max(ks)}"), "similar"),
        Finding("sequential: similar", "one response", at(f"sequential mean {budget}"), "similar"),
        Finding(
            "self-aggregation minus majority: SPIRAL above",
            f"self-aggregation, {steps} steps, minus majority of {max(ks)}",
            change(last, f"majority majority {max(ks)}"),
            "higher",
        ),
    ]


@dataclass(frozen=True, slots=True)
class Difference:
    """SPIRAL minus another arm. `verdict`: holds, opposite or undecided by the interval over seeds and problems."""

    claim: str
    quantity: str
    other: str
    mean: float
    problems: tuple[float, float]
    crossed: tuple[float, float]
    by_seed: list[float]
    verdict: str


def compare(finding: Finding, ours: Measured, theirs: Measured, other: str) -> Difference:
    """The finding's difference on the seeds that both have. Raises ValueError when they share none."""
    a, b = finding.of(ours), finding.of(theirs)
    seeds = min(len(a), len(b))
    if not seeds:
        raise ValueError(f"{other}: no seed to compare")
    differences = a[:seeds] - b[:seeds]
    crossed = crossed_interval(differences.tolist(), SEED)
    return Difference(
        finding.claim,
        finding.quantity,
        other,
        float(differences.mean()),
        bootstrap_interval(differences.mean(axis=0).tolist(), SEED),
        crossed,
        differences.mean(axis=1).tolist(),
        _verdict(crossed, finding.expected) + (" (one seed)" if seeds == 1 else ""),
    )


def _verdict(interval: tuple[float, float], expected: Expected) -> str:
    low, high = interval
    if expected == "similar":
        return "within the interval" if low <= 0 <= high else ("SPIRAL higher" if low > 0 else "SPIRAL lower")
    return "holds" if low > 0 else "opposite" if high < 0 else "undecided"


def efficiency(ks: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None]:
    """For each k of `ks`: k' / k, where the others' pass@k' is our pass@k; between the ks linear in log k.

    None where they do not reach it at the largest k, or have it already at the smallest: the curve says no more.
    """
    factors: dict[str, float | None] = {}
    for k, level in zip(ks, ours, strict=True):
        if not theirs[0] <= level <= theirs[-1]:
            factors[str(k)] = None
            continue
        after = next(i for i, value in enumerate(theirs) if value >= level)
        if after == 0:
            factors[str(k)] = ks[0] / k
            continue
        share = (level - theirs[after - 1]) / (theirs[after] - theirs[after - 1])
        needed = math.exp(math.log(ks[after - 1]) + share * math.log(ks[after] / ks[after - 1]))
        factors[str(k)] = needed / k
    return factors


def summary(measured: Measured) -> dict[str, Any]:
    """By measure: mean, both intervals, and the mean of each seed."""
    return {
        name: {
            "mean": float(values.mean()),
            "problems": bootstrap_interval(values.mean(axis=0).tolist(), SEED),
            "crossed": crossed_interval(values.tolist(), SEED),
            "by_seed": values.mean(axis=1).tolist(),
        }
        for name, values in measured.items()
    }


def as_json(difference: Difference) -> dict[str, Any]:
    return asdict(difference)
