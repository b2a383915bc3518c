"""The interface of a harness, and the measures that it returns.

    Harness.sampling_plan --> SamplingPlan --sample, grade--> one GradedEpisode a problem
    GradedEpisodes --Harness.measure--> Measures: numbers, each a mean over the problems

To add a harness, write a file with a subclass of `Harness` and list the class in
`registry.HARNESSES`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config.section import Section
from spiral_mega.evaluation.graded_episode import TOKEN_CATEGORIES, GradedEpisode


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a harness: the mean of `values`, which holds one value a problem, in order.

    axis, x    position on a curve: x responses ("k"), x-th aggregation ("step"), x tokens ("budget")
    parallel   how many responses were sampled side by side
    tokens     mean tokens a problem, by category (`TOKEN_CATEGORIES`)
    budget     most tokens that could have been generated for a problem
    """

    harness: str
    metric: str
    axis: str
    x: int
    parallel: int
    values: list[float]
    tokens: dict[str, float]
    budget: int

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)


class Harness(Section):
    """A way to spend compute at test time. Its methods receive rollout.sampling.max_response_tokens."""

    kind: str
    name: str | None = Field(default=None, description="Name of its results; null: its kind.")

    @property
    def label(self) -> str:
        return self.name or self.kind

    @abstractmethod
    def sampling_plan(self, max_response_tokens: int) -> SamplingPlan:
        """Return what to sample for each problem."""

    def token_budgets(self, max_response_tokens: int) -> list[int]:
        """Return the lengths, ascending, at which to grade truncated search traces; most need none."""
        return []

    @abstractmethod
    def measure(self, graded: Sequence[GradedEpisode], max_response_tokens: int) -> list[Measure]:
        """Compute the measures from one episode a problem, sampled by this harness's plan."""


def mean_tokens(spent: Sequence[dict[str, float]], factor: float = 1.0) -> dict[str, float]:
    """Average tokens by category over problems, and multiply the means by `factor`."""
    means = {}
    for category in TOKEN_CATEGORIES:
        total = math.fsum(tokens[category] for tokens in spent)
        means[category] = factor * total / len(spent)
    return means
