"""What is sampled for a problem: search traces, then levels of sets of earlier traces, each set
aggregated anew.

    problem --> search traces --draw--> sets --> aggregation traces --draw--> sets --> aggregation_2 traces ...
                    N1                K of n          N2 for each set
               \\_____________________ level 0 ______________________/  \\___________ level 1 __________/

Positions number the traces of an episode from 0: search first, then the aggregation traces set by
set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from spiral_mega.algorithm.sets import (
    SetDesign,
    SetOrder,
    check_design,
    sample_sets,
    shuffle_members,
)
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import AGGREGATION

Members = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """`num_sets` sets of `set_size` traces of the level below, each trace at most once in a set.

    `design` "independent" draws every set on its own, so that two may be equal; the other designs
    are those of `algorithm.sets`. A response has at most `max_tokens`; None:
    rollout.sampling.max_response_tokens.
    """

    num_sets: int
    set_size: int
    design: SetDesign | Literal["independent"]
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SetSpec:
    """One drawn set: positions of its members in `Episode.traces()`, in the order in which the
    prompt lists them.

    `component` is that of the traces which answer the set, and `max_tokens` their limit (None: the
    run's).
    """

    level: int
    members: Members
    component: str
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """`search_traces` responses to the problem; at each level, `aggregation_traces` responses to
    each of its sets.

    With `aggregation_traces` 0, sets are drawn for credit only, and nothing is sampled for them.
    `max_tokens` limits search traces; None: rollout.sampling.max_response_tokens.
    """

    search_traces: int
    aggregation_traces: int = 1
    levels: tuple[Level, ...] = ()
    max_tokens: int | None = None

    @classmethod
    def from_algorithm(cls, algorithm: AlgorithmConfig) -> SamplingPlan:
        """Return the paper's plan: N1 search traces, K sets of n, N2 aggregation traces for each.

        Raises ValueError as `check_design` does.
        """
        check_design(
            algorithm.search_traces, algorithm.set_size, algorithm.num_sets, algorithm.set_design
        )
        level = Level(algorithm.num_sets, algorithm.set_size, algorithm.set_design)
        return cls(algorithm.search_traces, algorithm.aggregation_traces, (level,))

    @classmethod
    def for_evaluation(cls, algorithm: AlgorithmConfig, training: SamplingPlan) -> SamplingPlan:
        """Return the plan of `from_algorithm`, for held-out problems.

        Where training draws sets for credit only, which cost no samples and may be many, aggregate
        no more sets than one partition of the search traces has.
        """
        plan = cls.from_algorithm(algorithm)
        if training.aggregation_traces or not training.levels:
            return plan
        level = plan.levels[0]
        num_sets = min(level.num_sets, algorithm.search_traces // algorithm.set_size)
        return replace(plan, levels=(replace(level, num_sets=num_sets),))

    def draw_sets(self, rng: np.random.Generator, order: SetOrder = "ascending") -> list[SetSpec]:
        """Draw the sets of all levels, level by level. `order` "random" then shuffles the members of every set."""
        specs = self._draw(rng)
        if order == "ascending":
            return specs
        shuffled = shuffle_members([spec.members for spec in specs], rng=rng)
        return [
            replace(spec, members=members) for spec, members in zip(specs, shuffled, strict=True)
        ]

    @property
    def largest_set(self) -> int:
        """The most traces shown in one aggregation prompt; 0 without aggregation."""
        return (
            max((level.set_size for level in self.levels), default=0)
            if self.aggregation_traces
            else 0
        )

    @property
    def components(self) -> tuple[str, ...]:
        """The component of each level's aggregation traces: aggregation, aggregation_2, ..."""
        return tuple(
            AGGREGATION if i == 0 else f"{AGGREGATION}_{i + 1}" for i in range(len(self.levels))
        )

    def _draw(self, rng: np.random.Generator) -> list[SetSpec]:
        specs: list[SetSpec] = []
        start, num_traces = 0, self.search_traces  # positions of the traces that a level draws from
        for number, level in enumerate(self.levels):
            for chosen in self._draw_level(level, num_traces, rng):
                members = tuple(start + trace for trace in chosen)
                specs.append(SetSpec(number, members, self.components[number], level.max_tokens))
            start, num_traces = start + num_traces, level.num_sets * self.aggregation_traces
        return specs

    def _draw_level(self, level: Level, num_traces: int, rng: np.random.Generator) -> list[Members]:
        """Draw one level's sets, with members numbered from 0 among the `num_traces` that it draws from."""
        if level.design == "independent":
            drawn = [
                rng.choice(num_traces, level.set_size, replace=False) for _ in range(level.num_sets)
            ]
            return [tuple(members.tolist()) for members in drawn]
        return sample_sets(num_traces, level.set_size, level.num_sets, rng=rng, method=level.design)
