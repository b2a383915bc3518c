"""Compare the evaluations with the paper's findings.

Pure functions of values by training seed and problem. Every comparison is of differences, paired by
problem and seed, with two 95 % intervals: over problems alone (these runs, other problems), and
over both seeds and problems (`intervals.crossed_interval`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from spiral_mega.statistics.intervals import bootstrap_interval, crossed_interval

Values = np.ndarray  # [seeds, problems]
Measured = Mapping[str, Values]  # by measure, "harness metric x"
Quantity = Callable[[Measured], Values]
Expected = Literal["higher", "similar"]

SEED = 0  # of the bootstrap


@dataclass(frozen=True, slots=True)
class Finding:
    """One claim of the paper: how SPIRAL compares in a quantity, which `values` computes."""

    claim: str
    quantity: str
    values: Quantity
    expected: Expected


def value_of(measure: str) -> Quantity:
    return lambda measured: measured[measure]


def difference_of(measure: str, baseline: str) -> Quantity:
    return lambda measured: measured[measure] - measured[baseline]


def paper_findings(ks: Sequence[int], steps: int, budget: int) -> list[Finding]:
    """Return the paper's findings on test-time compute.

    They are about pass@k at `ks`, `steps` of self-aggregation, and the longest sequential `budget`.
    """
    last_step, first_step = f"rsa mean {steps}", "rsa mean 0"
    majority = f"majority majority {max(ks)}"
    findings = []
    for k in ks:
        if k > 1:
            pass_at_k = value_of(f"pass_at_k pass {k}")
            findings.append(Finding("pass@k: SPIRAL above", f"pass@{k}", pass_at_k, "higher"))
    return [
        *findings,
        Finding(
            "self-aggregation: SPIRAL above",
            f"accuracy after {steps} steps",
            value_of(last_step),
            "higher",
        ),
        Finding(
            "self-aggregation: SPIRAL gains more",
            f"gain over {steps} steps",
            difference_of(last_step, first_step),
            "higher",
        ),
        Finding("majority: similar", f"majority of {max(ks)}", value_of(majority), "similar"),
        Finding(
            "sequential: similar", "one response", value_of(f"sequential mean {budget}"), "similar"
        ),
        Finding(
            "self-aggregation minus majority: SPIRAL above",
            f"self-aggregation, {steps} steps, minus majority of {max(ks)}",
            difference_of(last_step, majority),
            "higher",
        ),
    ]


@dataclass(frozen=True, slots=True)
class Difference:
    """SPIRAL minus another recipe: mean, intervals over problems and over both, mean by seed.

    `verdict` follows from the interval over seeds and problems: holds, opposite or undecided.
    """

    claim: str
    quantity: str
    other: str
    mean: float
    problems: tuple[float, float]
    crossed: tuple[float, float]
    by_seed: list[float]
    verdict: str


def compare(finding: Finding, ours: Measured, theirs: Measured, other: str) -> Difference:
    """Compute the finding's difference on the seeds that both have. Raises ValueError without any."""
    our_values, their_values = finding.values(ours), finding.values(theirs)
    seeds = min(len(our_values), len(their_values))
    if not seeds:
        raise ValueError(f"{other}: no seed to compare")
    differences = our_values[:seeds] - their_values[:seeds]
    crossed = crossed_interval(differences.tolist(), SEED)
    return Difference(
        claim=finding.claim,
        quantity=finding.quantity,
        other=other,
        mean=float(differences.mean()),
        problems=bootstrap_interval(differences.mean(axis=0).tolist(), SEED),
        crossed=crossed,
        by_seed=differences.mean(axis=1).tolist(),
        verdict=_verdict(crossed, finding.expected) + (" (one seed)" if seeds == 1 else ""),
    )


def _verdict(interval: tuple[float, float], expected: Expected) -> str:
    low, high = interval
    if expected == "similar":
        if low <= 0 <= high:
            return "within the interval"
        return "SPIRAL higher" if low > 0 else "SPIRAL lower"
    if low > 0:
        return "holds"
    return "opposite" if high < 0 else "undecided"


def response_factors(
    ks: Sequence[int], ours: Sequence[float], theirs: Sequence[float]
) -> dict[str, float | None]:
    """Return k' / k for each k of `ks`, where their pass@k' equals our pass@k.

    k' is interpolated linearly in log k. None where they do not reach it at the largest k, or
    exceed it at the smallest: the curve says nothing there.
    """
    factors: dict[str, float | None] = {}
    for k, level in zip(ks, ours, strict=True):
        within = theirs[0] <= level <= theirs[-1]
        factors[str(k)] = _responses_needed(ks, theirs, level) / k if within else None
    return factors


def _responses_needed(ks: Sequence[int], curve: Sequence[float], level: float) -> float:
    """Return the k at which the curve first reaches `level`, which lies within it."""
    after = next(i for i, value in enumerate(curve) if value >= level)
    if after == 0:
        return ks[0]
    share = (level - curve[after - 1]) / (curve[after] - curve[after - 1])
    return math.exp(math.log(ks[after - 1]) + share * math.log(ks[after] / ks[after - 1]))


def summarize_measures(measured: Measured) -> dict[str, Any]:
    """Return by measure the mean, both intervals, and the mean of each seed."""
    summaries = {}
    for name, values in measured.items():
        summaries[name] = {
            "mean": float(values.mean()),
            "problems": bootstrap_interval(values.mean(axis=0).tolist(), SEED),
            "crossed": crossed_interval(values.tolist(), SEED),
            "by_seed": values.mean(axis=1).tolist(),
        }
    return summaries
