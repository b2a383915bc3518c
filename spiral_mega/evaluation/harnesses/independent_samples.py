"""What the harnesses over independent responses (pass_at_k, majority, best_of_n) share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.evaluation.harnesses.harness import Harness, Measure, mean_tokens


class IndependentSamples(Harness):
    """Sample n responses to a problem, and measure the expected result of k of them."""

    samples: int = Field(
        default=32, gt=0, le=1000, description="Responses sampled for each problem."
    )
    ks: list[Annotated[int, Field(gt=0)]] | None = Field(
        default=None,
        min_length=1,
        description="Numbers of responses to report; null: powers of two up to `samples`.",
    )

    @model_validator(mode="after")
    def _check_ks(self) -> IndependentSamples:
        if self.ks is not None and max(self.ks) > self.samples:
            raise ValueError(
                f"eval.harnesses: ks holds {max(self.ks)}, but samples is {self.samples}: raise "
                "samples, or lower ks"
            )
        return self

    def sampling_plan(self, max_response_tokens: int) -> SamplingPlan:
        return SamplingPlan(self.samples)

    def reported_ks(self) -> list[int]:
        """Return the k to report: `ks`, or the powers of two up to `samples`, and `samples`."""
        if self.ks is not None:
            return sorted(set(self.ks))
        powers = {2**i for i in range(self.samples.bit_length())}
        return sorted(powers | {self.samples})

    def measure_at(
        self,
        k: int,
        metric: str,
        values: list[float],
        graded: Sequence[GradedEpisode],
        max_response_tokens: int,
    ) -> Measure:
        """Make the measure of k responses, which cost k times the mean response."""
        spent = [each.tokens_spent(range(self.samples)) for each in graded]
        return Measure(
            harness=self.label,
            metric=metric,
            axis="k",
            x=k,
            parallel=k,
            values=values,
            tokens=mean_tokens(spent, k / self.samples),
            budget=k * max_response_tokens,
        )
