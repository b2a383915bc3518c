"""Collects a step's batch: samples prompts until enough of them are effective (dynamic sampling)."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spiral_mega.config import BatchConfig
from spiral_mega.data.sampler import ProblemSampler
from spiral_mega.rollout.episode_builder import Task
from spiral_mega.rollout.pipeline import Pipeline
from spiral_mega.traces import Episode, Problem

log = logging.getLogger(__name__)

AssignCredit = Callable[[Episode], None]
"""Writes the advantages of a complete episode, from its rewards (see Objective.assign_credit)."""


@dataclass(slots=True)
class Batch:
    """A step's batch: this rank's episodes, and counts over all ranks.

    `sampled` are all complete episodes of this rank, of which `kept` are trained on, both in order
    of `Episode.index`. Over all ranks, `kept_indices` are the indices of the kept episodes in
    ascending order, `num_prompts` counts the prompts sampled, `num_effective` the effective ones
    among them, and `num_cancelled` those started in vain.
    """

    sampled: list[Episode]
    kept: list[Episode]
    kept_indices: list[int]
    num_prompts: int
    num_effective: int
    num_cancelled: int


class BatchCollector:
    """Collects the batch of each step."""

    def __init__(
        self,
        problems: Sequence[Problem],
        sampler: ProblemSampler,
        pipeline: Pipeline,
        config: BatchConfig,
        run_seed: int,
    ) -> None:
        self.problems, self.sampler = problems, sampler
        self.pipeline, self.config, self.run_seed = pipeline, config, run_seed

    def collect(self, step: int, assign_credit: AssignCredit) -> Batch:
        """Sample the batch of `step`. Collective; raises Interrupted.

        `assign_credit` is called for each episode as it completes: it decides whether the episode
        is effective, and with that how many prompts are still missing.

        With dynamic sampling the first `batch.problems` effective prompts are kept, or fewer when
        the bound on prompts is reached. Otherwise every prompt is kept, up to that number.
        """
        source = DynamicSampler(self, step, assign_credit)
        episodes = self.pipeline.stream(source)
        effective_by_index = source.batch_prompts()
        num_prompts = len(effective_by_index)
        num_cancelled = source.num_started - num_prompts
        if self.config.keep == "first":
            self.sampler.unread(num_cancelled)
        num_effective = sum(effective_by_index.values())
        if self.config.dynamic_sampling and num_effective < self.config.problems:
            log.warning(
                "%d of %d problems are effective after %d prompts (batch.max_resample_rounds is "
                "%d): training on those",
                num_effective,
                self.config.problems,
                source.num_started,
                self.config.max_resample_rounds,
            )
        kept_indices = self._kept(effective_by_index)
        sampled = [episode for episode in episodes if episode.index in effective_by_index]
        kept = set(kept_indices)
        return Batch(
            sampled=sampled,
            kept=[episode for episode in sampled if episode.index in kept],
            kept_indices=kept_indices,
            num_prompts=num_prompts,
            num_effective=num_effective,
            num_cancelled=num_cancelled,
        )

    def _kept(self, effective_by_index: dict[int, bool]) -> list[int]:
        candidates = sorted(effective_by_index)
        if self.config.dynamic_sampling:
            candidates = [index for index in candidates if effective_by_index[index]]
        return candidates[: self.config.problems]


class DynamicSampler:
    """Keeps enough prompts in flight to fill a step's batch at the current effective rate.

    That many, times `batch.oversample`, within the bound of `batch.max_resample_rounds`. With
    `batch.keep` "first" the batch is full when the first prompts, without a gap, hold enough
    effective ones; later prompts are cancelled as if they had not been drawn. What is kept then
    depends neither on which episodes finish early nor on the number of ranks.
    """

    def __init__(self, collector: BatchCollector, step: int, assign_credit: AssignCredit) -> None:
        self.collector, self.step, self.config = collector, step, collector.config
        self.assign_credit = assign_credit
        self.num_started = 0
        self.finalized: dict[int, bool] = {}  # by prompt index: whether it is effective
        self.occurrences: Counter[str] = Counter()  # of each problem in this step

    def finalize(self, episode: Episode) -> bool:
        """Assign credit; return whether the episode is effective."""
        self.assign_credit(episode)
        return episode.effective()

    def next(self, finalized: dict[int, bool]) -> list[Task] | None:
        """Return tasks for the prompts still missing; None when the batch is full."""
        self.finalized.update(finalized)
        if self._count(self.batch_prompts()) >= self.config.problems:
            return None
        missing = max(0, self.config.problems - self._count(self.finalized))
        needed = math.ceil(missing / self._effective_rate() * self.config.oversample)
        num_in_flight = self.num_started - len(self.finalized)
        return self._start(min(needed - num_in_flight, self._max_prompts() - self.num_started))

    def batch_prompts(self) -> dict[int, bool]:
        """Return, by index, whether each prompt of the batch so far is effective.

        With `keep` "first" these are the fewest finalized prompts, from the first on without a gap,
        that fill the batch; with "fastest" all finalized ones.
        """
        if self.config.keep == "fastest":
            return self.finalized
        first: dict[int, bool] = {}
        missing = self.config.problems
        while missing and len(first) in self.finalized:
            index = len(first)
            first[index] = self.finalized[index]
            missing -= first[index] or not self.config.dynamic_sampling
        return first

    def _effective_rate(self) -> float:
        """Return the share of finalized prompts that count, smoothed.

        Prior of half a batch: early completions are few and unrepresentative.
        """
        prior = self.config.problems / 2
        return (self._count(self.finalized) + prior) / (len(self.finalized) + prior)

    def _count(self, prompts: dict[int, bool]) -> int:
        """Return how many of the prompts count towards the batch."""
        return sum(prompts.values()) if self.config.dynamic_sampling else len(prompts)

    def _max_prompts(self) -> int:
        """Return the bound on the prompts of a step."""
        rounds = 1 + self.config.max_resample_rounds if self.config.dynamic_sampling else 1
        return math.ceil(self.config.problems * max(rounds, self.config.oversample))

    def _start(self, count: int) -> list[Task]:
        tasks = []
        for index in self.collector.sampler.next(max(count, 0)):
            problem = self.collector.problems[index]
            occurrence = self.occurrences[problem.id]
            seed_parts = (self.collector.run_seed, self.step, problem.id, occurrence)
            tasks.append(Task(problem, self.step, seed_parts))
            self.occurrences[problem.id] += 1
        self.num_started += len(tasks)
        return tasks
