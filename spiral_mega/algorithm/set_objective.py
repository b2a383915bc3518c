"""Set RL on search traces alone: the common part of recipes whose set score needs no aggregation.

Paper, 2.1. J = E[f(x, y_1..y_n)] (eq. 2). K of the C(N1, n) sets are scored; a trace learns the
mean of f(G) - mean(f) over the sets G that contain it. E[update] = M grad J (proposition 3.1).
Scores cost no samples, so K may be as large as C(N1, n).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from spiral_mega.algorithm.advantages import marginal_set_advantages
from spiral_mega.algorithm.length_gate import assign_gated
from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.algorithm.sets import gradient_scale
from spiral_mega.config.schema import AlgorithmConfig
from spiral_mega.traces import SEARCH, Episode, Problem, Trace

SetScore = Callable[[Problem, Sequence[Trace]], float]
"""f(x, G): a finite number for a problem and the traces of a set, in the set's order."""


class SetObjective:
    """Marginal set advantages with `score` as the set score."""

    components = (SEARCH,)

    def __init__(self, config: AlgorithmConfig, score: SetScore) -> None:
        """Read search_traces, set_size, num_sets, set_design and target_length of `config`.

        Raises ValueError as `check_design` does.
        """
        self.plan = replace(SamplingPlan.from_algorithm(config), aggregation_traces=0)
        self._config, self._score = config, score

    def assign_credit(self, episode: Episode) -> None:
        """Assign credit by equations 8 and 10.

        Raises ValueError for an episode without sets, and for a score that is not finite.
        """
        if not episode.sets:
            raise ValueError(
                f"problem {episode.problem.id} has no sets: {self._config.objective} needs them"
            )
        scores = []
        for chosen in episode.sets:
            members = [episode.search[trace] for trace in chosen]
            scores.append(self._score(episode.problem, members))
        advantages = marginal_set_advantages(episode.sets, scores, len(episode.search))
        assign_gated(episode.search, advantages, self._config.target_length)

    def gradient_scales(self) -> dict[str, float]:
        """M of proposition 3.1."""
        c = self._config
        return {SEARCH: gradient_scale(c.search_traces, c.set_size, c.num_sets, c.set_design)}
