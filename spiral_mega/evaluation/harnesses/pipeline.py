"""Harness `pipeline`: sequential, parallel and aggregative compute composed as its configuration declares.

{kind: pipeline, name: wide-then-long, read: majority,
 stages: [{search: 16, tokens: 1024}, {aggregate: 8, set_size: 4, tokens: 4096}, {aggregate: 8, set_size: 4}]}
"""

from __future__ import annotations

from collections.abc import Sequence

from spiral_mega.algorithm.sampling_plan import Level, SamplingPlan
from spiral_mega.config.harnesses import Composition
from spiral_mega.evaluation.graded_episode import GradedEpisode, Measure, level_budgets, level_positions, mean_tokens
from spiral_mega.evaluation.reducers import READINGS


def sampling_plan(harness: Composition, longest: int) -> SamplingPlan:
    first, *others = harness.stages
    levels = [
        Level(stage.aggregate, stage.set_size, "independent", stage.tokens)
        for stage in others
        if stage.aggregate is not None and stage.set_size is not None
    ]
    assert first.search is not None  # Composition has seen to it
    return SamplingPlan(first.search, levels=tuple(levels), max_tokens=first.tokens)


def measure(harness: Composition, plan: SamplingPlan, graded: Sequence[GradedEpisode], longest: int) -> list[Measure]:
    """One measure: the last stage, as the harness reads it, for what all stages cost."""
    positions, budget = level_positions(plan)[-1], level_budgets(plan, longest)[-1]
    values = [READINGS[harness.read](each, positions) for each in graded]
    tokens = mean_tokens([each.spent(range(positions.stop)) for each in graded])
    return [Measure(harness.name, harness.read, "step", len(plan.levels), plan.search_traces, values, tokens, budget)]
