"""Harness `pipeline`: sequential, parallel and aggregative compute composed as its configuration declares.

{kind: pipeline, name: wide-then-long, read: majority,
 stages: [{search: 16, tokens: 1024}, {aggregate: 8, set_size: 4, tokens: 4096}, {aggregate: 8, set_size: 4}]}
"""

from __future__ import annotations

from collections.abc import Sequence

from spiral_mega.algorithm.plan import Level, Plan
from spiral_mega.config.harnesses import Composition
from spiral_mega.evaluation.judged import Judged, Measure, level_budgets, level_positions, mean_tokens
from spiral_mega.evaluation.readings import READINGS


def plan(harness: Composition, longest: int) -> Plan:
    first, *others = harness.stages
    levels = [
        Level(stage.aggregate, stage.set_size, "independent", stage.tokens)
        for stage in others
        if stage.aggregate is not None and stage.set_size is not None
    ]
    assert first.search is not None  # Composition has seen to it
    return Plan(first.search, levels=tuple(levels), max_tokens=first.tokens)


def measure(harness: Composition, plan: Plan, judged: Sequence[Judged], longest: int) -> list[Measure]:
    """One measure: the last stage, as the harness reads it, for what all stages cost."""
    positions, budget = level_positions(plan)[-1], level_budgets(plan, longest)[-1]
    values = [READINGS[harness.read](each, positions) for each in judged]
    tokens = mean_tokens([each.spent(range(positions.stop)) for each in judged])
    return [Measure(harness.name, harness.read, "step", len(plan.levels), plan.search_traces, values, tokens, budget)]
