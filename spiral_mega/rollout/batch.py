"""Draw problems and sample episodes until the batch holds enough effective ones (dynamic sampling)."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from spiral_mega.algorithm.objectives import Objective
from spiral_mega.config import BatchConfig
from spiral_mega.data.sampler import ProblemSampler
from spiral_mega.distributed import gather_objects
from spiral_mega.rollout.pipeline import Pipeline, Task
from spiral_mega.traces import Episode, Problem

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Batch:
    """This rank's part of a step's episodes, and what all ranks know of the whole.

    `kept` are trained on, by their draw number; `sampled` holds every local episode, kept or not, with its draw
    number. `kept_draws` lists those of all ranks, in order; `draws` and `effective` count over all ranks.
    """

    sampled: list[tuple[int, Episode]]
    kept: list[tuple[int, Episode]]
    kept_draws: list[int]
    draws: int
    effective: int
    rounds: int


class BatchCollector:
    """Collects a step's batch. The same draws make the same batch whatever the number of ranks."""

    def __init__(
        self,
        problems: Sequence[Problem],
        sampler: ProblemSampler,
        pipeline: Pipeline,
        objective: Objective,
        config: BatchConfig,
        run_seed: int,
    ) -> None:
        self.problems, self.sampler, self.pipeline, self.objective = problems, sampler, pipeline, objective
        self.config, self.run_seed = config, run_seed

    def collect(self, step: int) -> Batch:
        """Sample episodes for `step`, with credit assigned; collective. Raises Interrupted (see Pipeline.run).

        With dynamic sampling the first `batch.problems` effective draws are kept; at the bound on rounds, what
        there is. Otherwise every draw is kept.
        """
        sampled: list[tuple[int, Episode]] = []
        flags: dict[int, bool] = {}
        occurrences: Counter[str] = Counter()
        rounds = 0
        want = self.config.problems
        while want:
            tasks = self._draw(step, want, occurrences)
            episodes = self.pipeline.run(tasks, aggregates=self.objective.aggregates)
            numbered = [(len(flags) + index, episode) for index, episode in episodes]
            for _, episode in numbered:
                self.objective.assign(episode)
            sampled += numbered
            for part in gather_objects([(draw, episode.effective()) for draw, episode in numbered]):
                flags.update(part)
            rounds += 1
            want = self._missing(flags, rounds)
        effective = [draw for draw in sorted(flags) if flags[draw]]
        chosen = set(effective[: self.config.problems] if self.config.dynamic_sampling else flags)
        return Batch(
            sampled=sampled,
            kept=[(draw, episode) for draw, episode in sampled if draw in chosen],
            kept_draws=sorted(chosen),
            draws=len(flags),
            effective=len(effective),
            rounds=rounds,
        )

    def _draw(self, step: int, count: int, occurrences: Counter[str]) -> list[Task]:
        tasks = []
        for index in self.sampler.next(count):
            problem = self.problems[index]
            tasks.append(Task(problem, step, (self.run_seed, step, problem.id, occurrences[problem.id])))
            occurrences[problem.id] += 1
        return tasks

    def _missing(self, flags: dict[int, bool], rounds: int) -> int:
        """How many problems the next round draws: the missing ones over the share that proved effective so far."""
        effective = sum(flags.values())
        missing = self.config.problems - effective
        if not self.config.dynamic_sampling or missing <= 0:
            return 0
        if rounds > self.config.max_resample_rounds:
            log.warning(
                "%d of %d problems are effective after %d rounds (batch.max_resample_rounds is %d): training on those",
                effective, self.config.problems, rounds, self.config.max_resample_rounds,
            )  # fmt: skip
            return 0
        share = max(effective, 1) / len(flags)
        return min(self.config.problems, math.ceil(missing / share))
