"""Recursive SPIRAL (paper, 3.3): the answers of one level form the sets of the next, and credit
goes to every level.

Level 1 has sets of search traces, level l + 1 sets of level l's answers. J = the expected reward of
the last level's answers (`rewarded: last`), or the sum over levels of each level's own (`rewarded:
every`). With f_S the mean reward of the answers to set S of a rewarded level of K sets, a trace y
below it gets

    (1/K) sum over S that descend from y of (f_S - the mean of f over the sets that do not),

and an answer to S, of N2, (r - f_S) N2 / (N2 - 1) / (K N2); the last level's, which have no other
credit, r - f_S as in SPIRAL. The baseline does not depend on y, so E[update] is grad J with scale 1
at every level but the last, and K (N2 - 1) there. Bias: where every set descends from y, nothing
tells what y is worth, and it gets none. So sets must stay small beside the number of traces: at 8
search traces, two levels of 2, not of 4.
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
    """One level: `num_sets` sets of `set_size` traces of the level below."""

    set_size: int = Field(gt=0)
    num_sets: int = Field(gt=1)


class Options(Section):
    """`levels`, the first over the search traces; `rewarded`: whose rewards count."""

    levels: list[Sets] = Field(min_length=1)
    rewarded: Literal["last", "every"] = "last"


class Recursive:
    """Credit by descent."""

    def __init__(self, config: AlgorithmConfig, options: Options) -> None:
        """Raises ValueError when a level's sets cannot be drawn, or no search trace would ever have credit."""
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
        """Credit of every level, then the length gate. Raises ValueError for sets or answers of another plan."""
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
        """Credit of all traces, in the order of `Episode.traces()`, from the rewards [sets, N2] of all levels."""
        first, answers = self.plan.search_traces, self.plan.aggregation_traces
        descends = _descent(sets, first, answers)
        scores = rewards.mean(axis=1)
        credit = np.zeros(first + rewards.size)
        own = rewards - scores[:, None]
        for number, of_level in self._rewarded():
            below = descends[of_level]  # [K, traces]
            count, total = below.sum(axis=0), scores[of_level] @ below
            k = len(below)
            others = (scores[of_level].sum() - total) / np.maximum(k - count, 1)
            credit += np.where(count < k, (total - count * others) / k, 0.0)
            scale = 1.0 if number == len(self.plan.levels) - 1 else 1 / (k * max(answers - 1, 1))
            place = slice(first + of_level.start * answers, first + of_level.stop * answers)
            credit[place] += scale * own[of_level].ravel()
        return credit

    def gradient_scales(self) -> dict[str, float]:
        """1 for search and for all answers but the last level's; K (N2 - 1) for those."""
        last = self.plan.levels[-1].num_sets * (self.plan.aggregation_traces - 1)
        return dict.fromkeys(self.components[:-1], 1.0) | {self.components[-1]: float(last)}

    def _rewarded(self) -> list[tuple[int, slice]]:
        """Number and sets of each rewarded level."""
        bounds = np.cumsum([0, *(level.num_sets for level in self.plan.levels)]).tolist()
        every = [(i, slice(bounds[i], bounds[i + 1])) for i in range(len(bounds) - 1)]
        return every if self._every else every[-1:]

    def _gives_credit_to_search(self) -> bool:
        """Whether, in any of NUM_TRIALS draws of the sets, some search trace can have credit."""
        rng = np.random.default_rng(0)
        for _ in range(NUM_TRIALS):
            sets = [spec.members for spec in self.plan.draw_sets(rng)]
            if self._compares_search(sets):
                return True
        return False

    def _compares_search(self, sets: list[tuple[int, ...]]) -> bool:
        """Whether some search trace has sets that descend from it and sets that do not, in a rewarded level."""
        of_search = _descent(sets, self.plan.search_traces, self.plan.aggregation_traces)[
            :, : self.plan.search_traces
        ]
        shares = [of_search[of_level].mean(axis=0) for _, of_level in self._rewarded()]
        return any(((share > 0) & (share < 1)).any() for share in shares)


def _descent(sets: list[tuple[int, ...]], search_traces: int, answers: int) -> FloatArray:
    """[sets, traces], 1 where the set shows the trace, or an answer that descends from it."""
    descends = np.zeros((len(sets), search_traces + len(sets) * answers))
    for l, members in enumerate(sets):
        for j in members:
            descends[l, j] = 1
            if j >= search_traces:
                descends[l] = np.maximum(descends[l], descends[(j - search_traces) // answers])
    return descends


def build(config: AlgorithmConfig, options: Options) -> Recursive:
    """The recipe."""
    return Recursive(config, options)
