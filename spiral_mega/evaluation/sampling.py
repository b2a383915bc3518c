"""Sampling what harnesses need: in chunks of problems, each from an empty engine, each on disk when it is whole.

A chunk therefore comes out the same whether or not the evaluation was interrupted before it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.evaluation.harnesses.registry import Sampling
from spiral_mega.evaluation.store import Store
from spiral_mega.rollout.episode_run import Task
from spiral_mega.rollout.pipeline import Pipeline
from spiral_mega.traces import Episode, Problem

log = logging.getLogger(__name__)


def sample(
    sampling: Sampling,
    problems: Sequence[Problem],
    pipeline: Pipeline,
    judge: Callable[[Episode], GradedEpisode],
    store: Store,
    runtime: Runtime,
    *,
    chunk: int,
    seed: int,
) -> None:
    """Make sure that `store` has the records and traces of all problems; collective.

    Seeds depend on run seed and problem alone, so that harnesses look at the same first traces. Raises Interrupted.
    """
    for number, start in enumerate(range(0, len(problems), chunk)):
        if gather_objects(store.has(sampling.name, number))[0]:
            continue
        if runtime.is_main:
            store.remove_traces(sampling.name, number)
        pipeline.engine.reset_prefix_cache()
        tasks = [Task(problem, -1, (seed, "eval", problem.id)) for problem in problems[start : start + chunk]]
        episodes = pipeline.run(tasks, aggregates=True)
        if pipeline.engine.replica.leader:
            store.write_traces(sampling.name, number, runtime.rank, episodes)
        parts = gather_objects([(episode.index, judge(episode)) for episode in episodes])
        if runtime.is_main:
            whole = sorted((item for part in parts for item in part), key=lambda item: item[0])
            store.write(sampling.name, number, [each for _, each in whole])
        log.info("%s: %d of %d problems", sampling.name, min(start + chunk, len(problems)), len(problems))
    gather_objects(None)  # the main rank's records are on disk
