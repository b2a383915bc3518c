"""Samples episodes over all ranks: search -> sets -> aggregation -> rewards, without barriers.

TaskSource -> tasks -> Scheduler (one a rank) <-> engine
                          |  ^
       RankStatus, Outbox v  | ExchangeResult
                       Exchange (all ranks)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config import AlgorithmConfig, RolloutConfig
from spiral_mega.environments import make_environment
from spiral_mega.process.heartbeat import heartbeat
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards import VerifierPool
from spiral_mega.rollout.engine import Sampler
from spiral_mega.rollout.episode_builder import SamplingContext, Task
from spiral_mega.rollout.exchange import Exchange, exchange_interval
from spiral_mega.rollout.scheduler import Scheduler, TaskSource
from spiral_mega.traces import Episode

log = logging.getLogger(__name__)

REPORT_S = 30.0  # between two log lines within a step


class Interrupted(Exception):
    """The run was asked to stop while episodes were being sampled; nothing of them is kept."""


class Pipeline:
    """Turns tasks into episodes with rewards, by the algorithm's sampling plan or by `plan`.

    `interrupted` is called at each exchange and returns whether to stop. Construction is
    collective.
    """

    def __init__(
        self,
        engine: Sampler,
        prompter: Prompter,
        verifier: VerifierPool,
        tokenizer: PreTrainedTokenizerBase,
        algorithm: AlgorithmConfig,
        rollout: RolloutConfig,
        interrupted: Callable[[], bool] = lambda: False,
        plan: SamplingPlan | None = None,
    ) -> None:
        self.engine, self.algorithm, self.interrupted = engine, algorithm, interrupted
        plan = plan or SamplingPlan.from_algorithm(algorithm)
        environment = make_environment(rollout.sampling)
        self.context = SamplingContext(
            prompter, verifier, tokenizer, plan, algorithm.set_order, rollout, environment
        )
        self.exchange_interval = exchange_interval(rollout)
        self.group = dist.new_group(backend="gloo")  # exchanges overlap the engines' collectives

    def run(self, tasks: Sequence[Task]) -> list[Episode]:
        """Sample an episode for each task; return this rank's, in order of `Episode.index`.

        Collective: every rank passes the same tasks. Raises Interrupted on all ranks if any was
        asked to stop.
        """
        return self.stream(_FixedTasks(tasks))

    def stream(self, source: TaskSource) -> list[Episode]:
        """As `run`, for tasks that `source` supplies one after another and may cancel.

        Indices number the tasks in the order in which they are supplied.
        """
        scheduler = Scheduler(self.context, self.engine, source, interrupted=self.interrupted)
        scheduler.start()
        progress = _ProgressLog(scheduler)
        with Exchange(self.engine.replica, self.group) as exchange:
            while True:
                scheduler.run_engine(self.exchange_interval)
                progress.report_when_due()
                result = exchange.submit(*scheduler.collect_status())
                if result is not None:
                    scheduler.apply(result)
                    if not scheduler.num_unfinalized:
                        break
                heartbeat()  # also on a rank without requests, while the others sample
        # Every rank has submitted as many exchanges as this one, so those still in flight have
        # completed.
        if scheduler.stopped:
            raise Interrupted
        return [scheduler.episodes[index] for index in sorted(scheduler.episodes)]


class _FixedTasks:
    """A source that supplies a list of tasks at once."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = list(tasks)

    def finalize(self, episode: Episode) -> bool:
        return True

    def next(self, finalized: dict[int, bool]) -> list[Task]:
        tasks, self.tasks = self.tasks, []
        return tasks


class _ProgressLog:
    """Logs how far sampling has come, every REPORT_S seconds."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.started = self.reported = time.monotonic()

    def report_when_due(self) -> None:
        now = time.monotonic()
        if now - self.reported <= REPORT_S:
            return
        self.reported = now
        sampled, in_flight = self.scheduler.num_samples, self.scheduler.num_in_flight()
        log.info(
            "%d traces sampled in %.0f s, %d in progress", sampled, now - self.started, in_flight
        )
