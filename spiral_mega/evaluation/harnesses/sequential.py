"""Harness `sequential`: the mean reward of one response as its budget of tokens grows (the paper's figure 6).

A response sampled with a small budget is the beginning of the one sampled with a large budget and the same seed. So
each is sampled once, with the largest, and graded as it stands after each budget: exact, paired, and cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.harnesses import Sequential
from spiral_mega.evaluation.graded_episode import GradedEpisode, Measure, mean_tokens


def sampling_plan(harness: Sequential, longest: int) -> SamplingPlan:
    return SamplingPlan(harness.samples, max_tokens=max(budgets(harness, longest)))


def budgets(harness: Sequential, longest: int) -> list[int]:
    """Ascending."""
    wanted = harness.budgets or [math.ceil(longest / share) for share in (8, 4, 2, 1)]
    return sorted(set(wanted))


def measure(harness: Sequential, plan: SamplingPlan, graded: Sequence[GradedEpisode], longest: int) -> list[Measure]:
    measures = []
    for budget in budgets(harness, longest):
        values = [math.fsum(each.cut[str(budget)]) / harness.samples for each in graded]
        spent = [each.spent(range(harness.samples)) for each in graded]
        for each, tokens in zip(graded, spent, strict=True):
            tokens["generated"] = sum(min(length, budget) for length in each.tokens["generated"])
        name = harness.name or harness.kind
        tokens = mean_tokens(spent, 1 / harness.samples)
        measures.append(Measure(name, "mean", "budget", budget, 1, values, tokens, budget))
    return measures
