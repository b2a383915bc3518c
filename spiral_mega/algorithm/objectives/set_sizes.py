"""Set sizes: SPIRAL over several set sizes (paper, 3.3).

Search traces learn to be useful alone, in pairs, and so on; aggregation traces learn to use them.
J = sum over the sizes n of J^(n) = E[f^(n)(x, y_1..y_n)], with f^(n) the mean reward of aggregation
over n traces. Each size has K sets and its own baseline. A_j = sum over the drawn sizes of
A_marg^(n)_j / M_n (proposition 3.1 at size n), which gives every size the same weight.

`sizes_per_problem` limits the cost: m of the S sizes are drawn for each problem, with equal
probabilities, so m K N2 aggregation traces are sampled and not S K N2. E[update] =
(m / S) (grad_search J + K (N2 - 1) grad_aggregation J).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from spiral_mega.algorithm.advantages import (
    FloatArray,
    aggregation_advantages,
    marginal_set_advantages,
    set_scores,
)
from spiral_mega.algorithm.length_gate import assign_gated, assign_gated_groups
from spiral_mega.algorithm.sampling_plan import Level, Members, SamplingPlan
from spiral_mega.algorithm.sets import gradient_scale, sample_sets
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.config.section import Section
from spiral_mega.traces import AGGREGATION, SEARCH, Episode, aggregation_rewards


class Options(Section):
    """Options of the recipe."""

    sizes: list[Annotated[int, Field(gt=0)]] = Field(min_length=1, description="The set sizes n.")
    sizes_per_problem: int | None = Field(
        default=None, gt=0, description="m: how many of the sizes each problem gets; null: all."
    )


@dataclass(frozen=True, slots=True)
class SizesPlan(SamplingPlan):
    """At its one level, the sets of `sizes_per_problem` of the `sizes`, which are drawn with equal
    chances.

    Each size drawn has as many sets, of the level's design; together they are `levels[0].num_sets`.
    """

    sizes: tuple[int, ...] = ()
    sizes_per_problem: int = 1

    def _draw_level(self, level: Level, num_traces: int, rng: np.random.Generator) -> list[Members]:
        """Draw K sets of each size drawn, size by size."""
        assert level.design != "independent"
        sets_per_size = level.num_sets // self.sizes_per_problem
        sets: list[Members] = []
        for i in sorted(rng.choice(len(self.sizes), self.sizes_per_problem, replace=False)):
            sets += sample_sets(
                num_traces, self.sizes[i], sets_per_size, rng=rng, method=level.design
            )
        return sets


class SetSizes:
    """Marginal set advantages of each size for search traces, within-set ones for aggregation traces."""

    components = (SEARCH, AGGREGATION)

    def __init__(self, config: AlgorithmConfig, options: Options) -> None:
        """Raises ValueError for sizes that are not distinct, or give search traces no credit."""
        sizes, drawn = options.sizes, options.sizes_per_problem or len(options.sizes)
        if len(set(sizes)) < len(sizes) or drawn > len(sizes):
            raise ValueError(
                f"algorithm.options.sizes is {sizes} and sizes_per_problem {drawn}: "
                "give at least as many distinct sizes"
            )
        self._scales = {
            n: gradient_scale(config.search_traces, n, config.num_sets, config.set_design)
            for n in sorted(sizes)
        }
        without_credit = [n for n, scale in self._scales.items() if scale == 0]
        if without_credit:
            raise ValueError(
                f"algorithm.options.sizes holds {without_credit[0]}, which gives the "
                f"{config.search_traces} search traces no credit (M is 0): leave it out, or raise "
                "algorithm.search_traces above it and num_sets above 1"
            )
        level = Level(drawn * config.num_sets, max(sizes), config.set_design)
        self.plan = SizesPlan(
            config.search_traces,
            config.aggregation_traces,
            (level,),
            sizes=tuple(sorted(sizes)),
            sizes_per_problem=drawn,
        )
        self._config = config

    def assign_credit(self, episode: Episode) -> None:
        """Sum the credit over set sizes; raises ValueError without sets or answers, or for another size."""
        rewards = aggregation_rewards(episode)
        search: FloatArray = np.zeros(len(episode.search))
        for size in dict.fromkeys(map(len, episode.sets)):
            if size not in self._scales:
                raise ValueError(
                    f"problem {episode.problem.id} has a set of {size}, which is not one of algorithm.options.sizes"
                )
            indices = [l for l, members in enumerate(episode.sets) if len(members) == size]
            sets = [episode.sets[l] for l in indices]
            scores = set_scores([rewards[l] for l in indices])
            search += marginal_set_advantages(sets, scores, len(search)) / self._scales[size]
        assign_gated(episode.search, search, self._config.target_length)
        assign_gated_groups(
            episode.aggregation, aggregation_advantages(rewards), self._config.target_length
        )

    def gradient_scales(self) -> dict[str, float]:
        """m / S for search, m / S K (N2 - 1) for aggregation."""
        share = self.plan.sizes_per_problem / len(self.plan.sizes)
        sets, answers = self._config.num_sets, self._config.aggregation_traces
        return {SEARCH: share, AGGREGATION: share * sets * (answers - 1)}


def build(config: AlgorithmConfig, options: Options) -> SetSizes:
    """Build the recipe."""
    return SetSizes(config, options)
