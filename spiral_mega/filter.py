"""`spiral-mega filter`: sample every training problem and keep those that the model sometimes solves."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

from spiral_mega.config import Config
from spiral_mega.data.difficulty import check_bounds, check_output, split_by_difficulty, write_problems
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
from spiral_mega.validation.models import check_models

log = logging.getLogger(__name__)

CHUNK = 64  # problems of a rank between two lines of progress


def filter_by_difficulty(
    config: Config, runtime: Runtime, output: Path, *, samples: int, low: float, high: float
) -> None:
    """Write the training problems with low < mean reward of `samples` responses < high to `output`; collective."""
    check_bounds(low, high)
    check_output(output)
    if output.resolve() in {Path(source.path).resolve() for source in config.data.train}:
        raise ConfigError(f"--output {output} is a training file itself: choose another name")
    config = config.model_copy(update={"two_models": None})  # of two models, the one that searches
    setup_logging(runtime.rank, Path(config.run.dir))
    check_models(config)
    tokenizer = load_tokenizer(config.model)
    prompter = Prompter(config.prompts, tokenizer)
    problems = load_problems(config.data.train, prompter.search_prompt, config.data.max_prompt_tokens)
    algorithm = config.algorithm.model_copy(update={"search_traces": samples})
    rewards: dict[str, list[float]] = {}
    with (
        make_verifier_pool(config.rewards, problems) as verifier,
        closing(build_engine(config, stop_ids(config.model, tokenizer), runtime)) as engine,
    ):
        engine.load_weights(pretrained_weights(config.model.path))
        pipeline = Pipeline(engine, prompter, verifier, tokenizer, algorithm, config.rollout)
        stride = CHUNK * runtime.world_size
        for start in range(0, len(problems), stride):
            chunk = problems[start : start + stride]
            tasks = [Task(problem, -1, (config.run.seed, "filter", problem.id)) for problem in chunk]
            episodes = pipeline.run(tasks, aggregates=False)
            sampled = {episode.problem.id: [trace.reward for trace in episode.search] for episode in episodes}
            for of_rank in gather_objects(sampled):
                rewards.update(of_rank)
            log.info("%d of %d problems sampled", len(rewards), len(problems))
    split = split_by_difficulty(problems, rewards, low, high)
    if runtime.is_main:
        write_problems(split.kept, output)
