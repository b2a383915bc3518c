"""Harness `sequential`: the mean reward of a response by its token budget (the paper's figure 6).

A response sampled with a small budget is the beginning of the one sampled with a large budget and
the same seed. So each response is sampled once, with the largest budget, truncated to every budget,
and graded there: exact, paired, and cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.evaluation.harnesses.harness import Harness, Measure, mean_tokens


class Sequential(Harness):
    """Mean reward of a single response, by its token budget."""

    kind: Literal["sequential"] = "sequential"
    samples: int = Field(default=8, gt=0, description="Responses sampled for each problem.")
    budgets: list[Annotated[int, Field(gt=0)]] | None = Field(
        default=None,
        min_length=1,
        description="Token limits of a response; null: 1/8, 1/4, 1/2 and all of "
        "rollout.sampling.max_response_tokens.",
    )

    def sampling_plan(self, max_response_tokens: int) -> SamplingPlan:
        return SamplingPlan(self.samples, max_tokens=max(self.token_budgets(max_response_tokens)))

    def token_budgets(self, max_response_tokens: int) -> list[int]:
        budgets = self.budgets or [
            math.ceil(max_response_tokens / divisor) for divisor in (8, 4, 2, 1)
        ]
        return sorted(set(budgets))

    def measure(self, graded: Sequence[GradedEpisode], max_response_tokens: int) -> list[Measure]:
        measures = []
        for budget in self.token_budgets(max_response_tokens):
            values = [
                math.fsum(each.truncated_rewards[str(budget)]) / self.samples for each in graded
            ]
            spent = [self._tokens_within(budget, each) for each in graded]
            tokens = mean_tokens(spent, 1 / self.samples)
            measures.append(
                Measure(self.label, "mean", "budget", budget, 1, values, tokens, budget)
            )
        return measures

    def _tokens_within(self, budget: int, graded: GradedEpisode) -> dict[str, float]:
        tokens = graded.tokens_spent(range(self.samples))
        tokens["generated"] = sum(min(length, budget) for length in graded.tokens["generated"])
        return tokens
