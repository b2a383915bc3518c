"""Harness `pipeline`: sequential, parallel and aggregative compute, combined as configured.

kind: pipeline
name: wide-then-long
reducer: majority
stages:
  - {search: 16, tokens: 1024}
  - {aggregate: 8, set_size: 4, tokens: 4096}
  - {aggregate: 8, set_size: 4}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from spiral_mega.algorithm.sampling_plan import Level, SamplingPlan
from spiral_mega.config.section import Section
from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.evaluation.harnesses.harness import Harness, Measure, mean_tokens
from spiral_mega.evaluation.harnesses.populations import REDUCERS, level_budgets, level_positions


class Stage(Section):
    """One stage of a pipeline: `search` responses to the problem, or `aggregate` answers to sets.

    Each answer has its own set. A set has `set_size` traces of the previous stage.
    """

    search: int | None = Field(
        default=None, gt=0, description="First stage: responses to the problem."
    )
    aggregate: int | None = Field(
        default=None, gt=0, description="Later stages: sets, with one response each."
    )
    set_size: int | None = Field(default=None, gt=0, description="Later stages: traces of a set.")
    tokens: int | None = Field(
        default=None,
        gt=0,
        description="Limit of a response; null: rollout.sampling.max_response_tokens.",
    )


class StagedPipeline(Harness):
    """A search and any number of aggregations after it, scored at the end."""

    kind: Literal["pipeline"] = "pipeline"
    name: str
    stages: list[Stage] = Field(min_length=1)
    reducer: Literal["mean", "majority", "best"] = Field(
        default="mean",
        description="Score of the last stage: mean reward, reward of the majority's answer, or the "
        "oracle's best.",
    )

    @model_validator(mode="after")
    def _check_stages(self) -> StagedPipeline:
        population = 0  # of the previous stage
        for number, stage in enumerate(self.stages):
            where = f"eval.harnesses: stage {number} of {self.name!r}"
            if number == 0 and (
                stage.search is None or stage.aggregate is not None or stage.set_size is not None
            ):
                raise ValueError(f"{where} must have search, and neither aggregate nor set_size")
            if number > 0 and (
                stage.search is not None or stage.aggregate is None or stage.set_size is None
            ):
                raise ValueError(f"{where} must have aggregate and set_size, and no search")
            if stage.set_size is not None and stage.set_size > population:
                raise ValueError(
                    f"{where} has set_size {stage.set_size}, but the previous stage has "
                    f"{population} traces: lower set_size, or raise that stage's number of "
                    "responses"
                )
            population = stage.search or stage.aggregate or 0
        return self

    def sampling_plan(self, max_response_tokens: int) -> SamplingPlan:
        search, *aggregations = self.stages
        levels = []
        for stage in aggregations:
            assert stage.aggregate is not None  # _check_stages
            assert stage.set_size is not None
            levels.append(Level(stage.aggregate, stage.set_size, "independent", stage.tokens))
        assert search.search is not None  # _check_stages
        return SamplingPlan(search.search, levels=tuple(levels), max_tokens=search.tokens)

    def measure(self, graded: Sequence[GradedEpisode], max_response_tokens: int) -> list[Measure]:
        """Compute one measure: the last stage's score, at the cost of all stages."""
        plan = self.sampling_plan(max_response_tokens)
        positions = level_positions(plan)[-1]
        reduce = REDUCERS[self.reducer]
        return [
            Measure(
                harness=self.label,
                metric=self.reducer,
                axis="step",
                x=len(plan.levels),
                parallel=plan.search_traces,
                values=[reduce(each, positions) for each in graded],
                tokens=mean_tokens([each.tokens_spent(range(positions.stop)) for each in graded]),
                budget=level_budgets(plan, max_response_tokens)[-1],
            )
        ]
