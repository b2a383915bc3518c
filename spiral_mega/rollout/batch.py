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
from spiral_mega.rollout.episode_run import Task
from spiral_mega.rollout.pipeline import Pipeline
from spiral_mega.traces import Episode, Problem

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Batch:
    """A step's batch: this rank's episodes, and counts over all ranks.

    `sampled` are all complete episodes of this rank, of which `kept` are trained on, both in order of `Episode.index`.
    Over all ranks, `kept_indices` are the indices of the kept episodes in ascending order, `num_prompts` counts the
    prompts sampled, `num_effective` those of them with an effective episode, and `num_cancelled` those started in vain.
    """

    sampled: list[Episode]
    kept: list[Episode]
    kept_indices: list[int]
    num_prompts: int
    num_effective: int
    num_cancelled: int


class BatchCollector:
    """Collects a step's batch."""

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

        With dynamic sampling the first `batch.problems` effective draws are kept; at the bound on draws, what
        there is. Otherwise every draw is kept, up to that number.
        """
        feed = _Draws(self, step)
        sampled = self.pipeline.stream(feed, aggregates=bool(self.objective.plan.levels))
        settled = feed.decided()
        self.sampler.unread(feed.drawn - len(settled) if self.config.keep == "first" else 0)
        effective = sum(settled.values())
        if self.config.dynamic_sampling and effective < self.config.problems:
            log.warning(
                "%d of %d problems are effective after %d draws (batch.max_resample_rounds is %d): training on those",
                effective, self.config.problems, feed.drawn, self.config.max_resample_rounds,
            )  # fmt: skip
        kept = [index for index, counts in sorted(settled.items()) if counts or not self.config.dynamic_sampling]
        kept = kept[: self.config.problems]
        sampled = [episode for episode in sampled if episode.index in settled]
        return Batch(
            sampled=sampled,
            kept=[episode for episode in sampled if episode.index in set(kept)],
            kept_indices=kept,
            num_prompts=len(settled),
            num_effective=effective,
            num_cancelled=feed.drawn - len(settled),
        )


class _Draws:
    """The feed of a step: in progress are as many problems as the missing ones will take, times `batch.oversample`.

    With `batch.keep` "first" the batch is full when the first draws, without a gap, hold what is wanted; those after
    them are given up as if they had not been drawn. What is kept then does not depend on which episodes end early, nor
    on the number of ranks.
    """

    def __init__(self, collector: BatchCollector, step: int) -> None:
        self.collector, self.step, self.config = collector, step, collector.config
        self.drawn = 0
        self.settled: dict[int, bool] = {}  # by draw number: whether it is effective
        self.occurrences: Counter[str] = Counter()

    def settle(self, episode: Episode) -> bool:
        self.collector.objective.assign_credit(episode)
        return episode.effective()

    def next(self, settled: dict[int, bool]) -> list[Task] | None:
        self.settled.update(settled)
        if self._count(self.decided()) >= self.config.problems:
            return None
        missing = max(0, self.config.problems - self._count(self.settled))
        # As if half a batch of effective problems had gone before: the first to end are few and not like the others.
        prior = self.config.problems / 2
        share = (self._count(self.settled) + prior) / (len(self.settled) + prior)
        in_progress = self.drawn - len(self.settled)
        wanted = math.ceil(missing / share * self.config.oversample) - in_progress
        return self._draw(min(wanted, self._most() - self.drawn))

    def decided(self) -> dict[int, bool]:
        """The draws that the batch is made of, so far: with `keep` "first" the least that fill it, without a gap."""
        if self.config.keep == "fastest":
            return self.settled
        first: dict[int, bool] = {}
        missing = self.config.problems
        while missing and len(first) in self.settled:
            counts = self.settled[len(first)]
            first[len(first)] = counts
            missing -= counts or not self.config.dynamic_sampling
        return first

    def _count(self, draws: dict[int, bool]) -> int:
        return sum(draws.values()) if self.config.dynamic_sampling else len(draws)

    def _most(self) -> int:
        """Bound on the draws of a step."""
        rounds = 1 + self.config.max_resample_rounds if self.config.dynamic_sampling else 1
        return math.ceil(self.config.problems * max(rounds, self.config.oversample))

    def _draw(self, count: int) -> list[Task]:
        tasks = []
        for index in self.collector.sampler.next(count) if count > 0 else ():
            problem = self.collector.problems[index]
            parts = (self.collector.run_seed, self.step, problem.id, self.occurrences[problem.id])
            tasks.append(Task(problem, self.step, parts))
            self.occurrences[problem.id] += 1
        self.drawn += len(tasks)
        return tasks
