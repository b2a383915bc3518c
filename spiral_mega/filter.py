"""`spiral-mega filter`: sample every training problem, and keep those that the model sometimes solves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.config import Config, DataSource
from spiral_mega.data.difficulty import (
    check_bounds,
    check_output,
    split_by_difficulty,
    write_problems,
)
from spiral_mega.data.problems import load_problems
from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import ConfigError
from spiral_mega.models.tokenizer import load_tokenizer, stop_ids
from spiral_mega.models.weights import pretrained_weights
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards.verifier import make_verifier_pool
from spiral_mega.rollout import build_engine
from spiral_mega.rollout.episode_builder import Task
from spiral_mega.rollout.pipeline import Pipeline
from spiral_mega.telemetry import setup_logging
from spiral_mega.traces import Problem
from spiral_mega.validation.models import check_models

log = logging.getLogger(__name__)

PROBLEMS_PER_CHUNK = 64  # on each rank, between two progress lines


def filter_by_difficulty(
    config: Config, runtime: Runtime, output: Path, *, samples: int, low: float, high: float
) -> None:
    """Write the training problems with low < mean reward of `samples` responses < high to `output`;
    collective.

    With two models, the search model is sampled. Raises ConfigError or DataError for bounds,
    output, model or data that cannot be used.
    """
    check_bounds(low, high)
    check_output(output)
    _check_no_source(output, config.data.train)
    config = config.model_copy(update={"two_models": None})
    setup_logging(runtime.rank, Path(config.run.dir))
    check_models(config)
    tokenizer = load_tokenizer(config.model)
    prompter = Prompter(config.prompts, tokenizer)
    problems = load_problems(
        config.data.train, prompter.search_prompt, config.data.max_prompt_tokens
    )
    plan = SamplingPlan(samples)
    with (
        make_verifier_pool(config.rewards, problems) as verifier,
        closing(build_engine(config, stop_ids(config.model, tokenizer), runtime)) as engine,
    ):
        engine.load_weights(pretrained_weights(config.model.path))
        pipeline = Pipeline(
            engine, prompter, verifier, tokenizer, config.algorithm, config.rollout, plan=plan
        )
        rewards = _sample_rewards(pipeline, problems, config.run.seed, runtime.world_size)
    split = split_by_difficulty(problems, rewards, low, high)
    if runtime.is_main:
        write_problems(split.kept, output)


def _check_no_source(output: Path, sources: Sequence[DataSource]) -> None:
    if output.resolve() in {Path(source.path).resolve() for source in sources}:
        raise ConfigError(f"--output {output} is a training file itself: choose another name")


def _sample_rewards(
    pipeline: Pipeline, problems: Sequence[Problem], run_seed: int, world_size: int
) -> dict[str, list[float]]:
    """Return the rewards of each problem's responses, by its id; collective, and equal on all ranks."""
    rewards: dict[str, list[float]] = {}
    chunk_size = PROBLEMS_PER_CHUNK * world_size
    for start in range(0, len(problems), chunk_size):
        chunk = problems[start : start + chunk_size]
        tasks = [Task(problem, -1, (run_seed, "filter", problem.id)) for problem in chunk]
        sampled: dict[str, list[float]] = {}
        for episode in pipeline.run(tasks):
            sampled[episode.problem.id] = [trace.reward for trace in episode.search]
        for of_rank in gather_objects(sampled):
            rewards |= of_rank
        log.info("%d of %d problems sampled", len(rewards), len(problems))
    return rewards
