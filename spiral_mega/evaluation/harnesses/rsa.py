"""Harness `rsa`: recursive self-aggregation (Venkatraman et al., 2025; the paper's figure 4).

Step 0 is a population of responses to the problem. Each further step samples as many responses, and
shows each its own set of the previous population's traces, drawn without replacement. Every
population is reported by all `REDUCERS`: the mean reward (what the paper reports), the reward of
the majority's answer, and that of an oracle's pick.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from spiral_mega.algorithm.sampling_plan import Level, SamplingPlan
from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.evaluation.harnesses.harness import Harness, Measure, mean_tokens
from spiral_mega.evaluation.harnesses.populations import REDUCERS, level_budgets, level_positions


class Rsa(Harness):
    """Recursive self-aggregation: each population answers sets of the previous one's traces."""

    kind: Literal["rsa"] = "rsa"
    population: int = Field(default=8, gt=0, description="Traces of each step.")
    set_size: int = Field(default=4, gt=0, description="Traces shown to each response.")
    steps: int = Field(default=4, gt=0, description="Aggregations one after the other.")

    @model_validator(mode="after")
    def _check_set_size(self) -> Rsa:
        if self.set_size > self.population:
            raise ValueError(
                f"eval.harnesses: rsa has set_size {self.set_size} and a population of "
                f"{self.population}: a set takes each trace once, so lower set_size or raise "
                "population"
            )
        return self

    def sampling_plan(self, max_response_tokens: int) -> SamplingPlan:
        level = Level(self.population, self.set_size, "independent")
        return SamplingPlan(self.population, levels=(level,) * self.steps)

    def measure(self, graded: Sequence[GradedEpisode], max_response_tokens: int) -> list[Measure]:
        plan = self.sampling_plan(max_response_tokens)
        levels = zip(level_positions(plan), level_budgets(plan, max_response_tokens), strict=True)
        measures = []
        for step, (positions, budget) in enumerate(levels):
            tokens = mean_tokens([each.tokens_spent(range(positions.stop)) for each in graded])
            for metric, reduce in REDUCERS.items():
                values = [reduce(each, positions) for each in graded]
                measures.append(
                    Measure(
                        self.label, metric, "step", step, self.population, values, tokens, budget
                    )
                )
        return measures
