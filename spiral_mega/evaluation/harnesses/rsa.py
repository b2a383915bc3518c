"""Harness `rsa`: recursive self-aggregation (Venkatraman et al., 2025; the paper's figure 4).

Step 0 is a population of responses to the problem. At each further step as many responses are sampled, each shown its
own set of the last population's traces, drawn without replacement. Three readings of every population: the mean reward
(what the paper reports), that of the majority's answer, and that of an oracle's pick.
"""

from __future__ import annotations

from collections.abc import Sequence

from spiral_mega.algorithm.sampling_plan import Level, SamplingPlan
from spiral_mega.config.harnesses import Rsa
from spiral_mega.evaluation.graded_episode import GradedEpisode, Measure, level_budgets, level_positions, mean_tokens
from spiral_mega.evaluation.reducers import READINGS


def sampling_plan(harness: Rsa, longest: int) -> SamplingPlan:
    level = Level(harness.population, harness.set_size, "independent")
    return SamplingPlan(harness.population, levels=(level,) * harness.steps)


def measure(harness: Rsa, plan: SamplingPlan, graded: Sequence[GradedEpisode], longest: int) -> list[Measure]:
    measures, name = [], harness.name or harness.kind
    levels = zip(level_positions(plan), level_budgets(plan, longest), strict=True)
    for step, (positions, budget) in enumerate(levels):
        tokens = mean_tokens([each.spent(range(positions.stop)) for each in graded])
        for metric, read in READINGS.items():
            values = [read(each, positions) for each in graded]
            measures.append(Measure(name, metric, "step", step, harness.population, values, tokens, budget))
    return measures
