"""Recursive SPIRAL (paper, 3.3): the answers of one level form the sets of the next.

    search traces --sets--> answers of level 1 --sets--> answers of level 2 --> ...

J = the expected reward of the last level's answers (`rewarded: last`), or the sum over levels of
the expected reward of each level's answers (`rewarded: every`). Let f_S be the mean reward of the
N2 answers to set S, in a rewarded level of K sets. A trace y below that level gets

    (1/K) sum over S that descend from y of (f_S - the mean of f over the sets that do not),

and an answer to S gets (r - f_S) N2 / (N2 - 1) / (K N2). Answers of the last level, which have no
other credit, get r - f_S as in SPIRAL. The baseline does not depend on y, so E[update] is grad J
with scale 1 at every level but the last, and K (N2 - 1) there.

Bias: a trace from which every set descends has no sets to be compared with, and gets no credit. So
sets must be small relative to the number of traces: for 8 search traces, two levels of 2, not of 4.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from spiral_mega.algorithm.advantages import FloatArray
from spiral_mega.algorithm.length_gate import assign_gated
from spiral_mega.algorithm.sampling_plan import Level, SamplingPlan
from spiral_mega.algorithm.sets import check_design
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.config.section import Section
from spiral_mega.traces import SEARCH, Episode, aggregation_rewards

NUM_TRIALS = 100  # draws of the sets in which to look for a search trace that can have credit


class Sets(Section):
    """The sets of one level."""

    set_size: int = Field(gt=0, description="Traces of the level below in a set.")
    num_sets: int = Field(gt=1, description="Sets of the level.")


class Options(Section):
    """Options of the recipe."""

    levels: list[Sets] = Field(
        min_length=1, description="The levels; the first is over search traces."
    )
    rewarded: Literal["last", "every"] = Field(
        default="last", description="Levels whose rewards count."
    )


class Recursive:
    """Credit by comparison of the sets that descend from a trace with those that do not."""

    def __init__(self, config: AlgorithmConfig, options: Options) -> None:
        """Raises ValueError if sets cannot be drawn, or no search trace could have credit."""
        population = config.search_traces
        for number, sets in enumerate(options.levels):
            try:
                check_design(population, sets.set_size, sets.num_sets, config.set_design)
            except ValueError as error:
                raise ValueError(
                    f"algorithm.options.levels.{number}, over {population} traces: {error}"
                ) from error
            population = sets.num_sets * config.aggregation_traces
        levels = tuple(
            Level(sets.num_sets, sets.set_size, config.set_design) for sets in options.levels
        )
        self.plan = SamplingPlan(config.search_traces, config.aggregation_traces, levels)
        self.components = (SEARCH, *self.plan.components)
        self._target_length, self._every = config.target_length, options.rewarded == "every"
        if not self._gives_credit_to_search():
            raise ValueError(
                "algorithm.options.levels: every rewarded set would descend from every search "
                "trace, so none could have credit: lower set_size, or raise "
                "algorithm.search_traces or num_sets"
            )

    def assign_credit(self, episode: Episode) -> None:
        """Assign credit to every level; raises ValueError for sets or answers of another plan."""
        rewards = np.array(aggregation_rewards(episode))
        if rewards.shape != (
            sum(level.num_sets for level in self.plan.levels),
            self.plan.aggregation_traces,
        ):
            raise ValueError(
                f"problem {episode.problem.id} has answers {rewards.shape}: not those of this plan"
            )
        traces = episode.traces()
        assign_gated(traces, self.advantages(episode.sets, rewards), self._target_length)

    def advantages(self, sets: list[tuple[int, ...]], rewards: FloatArray) -> FloatArray:
        """Return the advantages of all traces, in the order of `Episode.traces()`.

        `rewards` [sets, N2] are those of the answers to all sets, level by level.
        """
        search_traces, answers = self.plan.search_traces, self.plan.aggregation_traces
        descends = _descent(sets, search_traces, answers)
        scores = rewards.mean(axis=1)
        credit = np.zeros(search_traces + rewards.size)
        within_set = rewards - scores[:, None]
        for number, of_level in self._rewarded_levels():
            member = descends[of_level]  # [K, traces]
            num_sets = len(member)
            num_descending, total = member.sum(axis=0), scores[of_level] @ member
            baseline = (scores[of_level].sum() - total) / np.maximum(num_sets - num_descending, 1)
            marginal = (total - num_descending * baseline) / num_sets
            credit += np.where(num_descending < num_sets, marginal, 0.0)
            last = number == len(self.plan.levels) - 1
            scale = 1.0 if last else 1 / (num_sets * max(answers - 1, 1))
            start, stop = (
                search_traces + index * answers for index in (of_level.start, of_level.stop)
            )
            credit[start:stop] += scale * within_set[of_level].ravel()
        return credit

    def gradient_scales(self) -> dict[str, float]:
        """1 for search traces and for all answers but the last level's, whose scale is K (N2 - 1)."""
        last = self.plan.levels[-1].num_sets * (self.plan.aggregation_traces - 1)
        return dict.fromkeys(self.components[:-1], 1.0) | {self.components[-1]: float(last)}

    def _rewarded_levels(self) -> list[tuple[int, slice]]:
        """Return the number and the set indices of each rewarded level."""
        bounds = np.cumsum([0, *(level.num_sets for level in self.plan.levels)]).tolist()
        levels = [(i, slice(bounds[i], bounds[i + 1])) for i in range(len(bounds) - 1)]
        return levels if self._every else levels[-1:]

    def _gives_credit_to_search(self) -> bool:
        """Return whether in any of NUM_TRIALS draws of the sets some search trace can have credit."""
        rng = np.random.default_rng(0)
        for _ in range(NUM_TRIALS):
            sets = [spec.members for spec in self.plan.draw_sets(rng)]
            if self._compares_search(sets):
                return True
        return False

    def _compares_search(self, sets: list[tuple[int, ...]]) -> bool:
        """Return whether, in a rewarded level, some but not all sets descend from a search trace."""
        search_traces = self.plan.search_traces
        descends = _descent(sets, search_traces, self.plan.aggregation_traces)[:, :search_traces]
        shares = [descends[of_level].mean(axis=0) for _, of_level in self._rewarded_levels()]
        return any(((share > 0) & (share < 1)).any() for share in shares)


def _descent(sets: list[tuple[int, ...]], search_traces: int, answers: int) -> FloatArray:
    """Return [sets, traces], 1 where the set contains the trace or an answer that descends from it."""
    descends = np.zeros((len(sets), search_traces + len(sets) * answers))
    for l, members in enumerate(sets):
        for position in members:
            descends[l, position] = 1
            if position >= search_traces:
                answered_set = (position - search_traces) // answers
                descends[l] = np.maximum(descends[l], descends[answered_set])
    return descends


def build(config: AlgorithmConfig, options: Options) -> Recursive:
    """Build the recipe."""
    return Recursive(config, options)
