"""What is sampled for a problem: search traces, then levels of sets of earlier traces, each set answered anew."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from spiral_mega.algorithm.sets import SetDesign, check_design, sample_sets
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import AGGREGATION

Members = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """`sets` sets of `set_size` traces of the level before, each trace at most once in a set.

    `design` "independent" draws every set on its own, so that two may be equal; the others are those of
    `algorithm.sets`. A response has at most `max_tokens`; None: rollout.sampling.max_response_tokens.
    """

    sets: int
    set_size: int
    design: SetDesign | Literal["independent"]
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """`search_traces` responses to the problem; at each level, `answers` responses to each of its sets.

    With 0 answers sets are drawn for the sake of credit alone, and shown to no one.
    """

    search_traces: int
    answers: int = 1
    levels: tuple[Level, ...] = ()
    max_tokens: int | None = None

    @classmethod
    def from_algorithm(cls, algorithm: AlgorithmConfig) -> SamplingPlan:
        """The paper's: N1 search traces, K sets of n, N2 answers to each. Raises ValueError as `check_design` does."""
        check_design(algorithm.search_traces, algorithm.set_size, algorithm.num_sets, algorithm.set_design)
        level = Level(algorithm.num_sets, algorithm.set_size, algorithm.set_design)
        return cls(algorithm.search_traces, algorithm.aggregation_traces, (level,))

    @classmethod
    def for_evaluation(cls, algorithm: AlgorithmConfig, training: SamplingPlan) -> SamplingPlan:
        """As `of`; but where training draws sets for credit alone, which cost nothing there and may be many, no more
        than a partition of the search traces has."""
        plan = cls.from_algorithm(algorithm)
        if training.answers or not training.levels:
            return plan
        level = plan.levels[0]
        sets = min(level.sets, algorithm.search_traces // algorithm.set_size)
        return replace(plan, levels=(replace(level, sets=sets),))

    def draw_sets(self, rng: np.random.Generator) -> list[Members]:
        """The sets of all levels, one after the other; members are positions in `Episode.traces()`."""
        sets: list[Members] = []
        first, population = 0, self.search_traces  # of the level before
        for level in self.levels:
            sets += [tuple(first + j for j in members) for members in _draw(level, population, rng)]
            first, population = first + population, level.sets * self.answers
        return sets

    @property
    def largest_set(self) -> int:
        """The most traces that are shown together; 0 where none are."""
        return max((level.set_size for level in self.levels), default=0) if self.answers else 0

    @property
    def components(self) -> tuple[str, ...]:
        """The component of the answers to each level's sets."""
        return tuple(AGGREGATION if i == 0 else f"{AGGREGATION}_{i + 1}" for i in range(len(self.levels)))

    def component(self, set_index: int) -> str:
        """The component of the answers to the set of this index."""
        return self.components[self._level(set_index)]

    def limit(self, set_index: int | None) -> int | None:
        """The bound on a response to the set of this index (None: to the problem), where the plan has its own."""
        if set_index is None:
            return self.max_tokens
        return self.levels[self._level(set_index)].max_tokens

    def _level(self, set_index: int) -> int:
        for i, level in enumerate(self.levels):
            if set_index < level.sets:
                return i
            set_index -= level.sets
        raise IndexError(f"the plan has {sum(level.sets for level in self.levels)} sets")


def _draw(level: Level, population: int, rng: np.random.Generator) -> list[Members]:
    if level.design == "independent":
        drawn = [rng.choice(population, level.set_size, replace=False) for _ in range(level.sets)]
        return [tuple(members.tolist()) for members in drawn]
    return sample_sets(population, level.set_size, level.sets, rng=rng, method=level.design)
