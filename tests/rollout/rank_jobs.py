"""What the ranks do for the tests of rollouts and evaluation. Runs under torchrun."""

import logging
import random
import time
from pathlib import Path
from typing import Any

from spiral_mega.algorithm.objectives import make_objective
from spiral_mega.config import AlgorithmConfig, BatchConfig, Config
from spiral_mega.data.sampler import ProblemSampler
from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.evaluation.accuracy import measure_accuracy
from spiral_mega.filter import filter_by_difficulty
from spiral_mega.models.tokenizer import load_tokenizer, stop_ids
from spiral_mega.models.weights import pretrained_weights
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards import VerifierPool
from spiral_mega.rollout import build_engine
from spiral_mega.rollout.batch import Batch, BatchCollector
from spiral_mega.rollout.batch_metrics import batch_metrics
from spiral_mega.rollout.engine import Sample, make_replica
from spiral_mega.rollout.episode_builder import Task
from spiral_mega.rollout.exchange import LAG
from spiral_mega.rollout.pipeline import Interrupted, Pipeline
from spiral_mega.traces import Episode, Problem, Trace
from tests.rollout.scripted import (
    UNEVEN,
    ScriptedEngine,
    ScriptedPipeline,
    first_come,
    pipeline_of,
    problem,
    settings,
    task,
)


def run_jobs(runtime: Runtime, jobs: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Every job by name: one of the functions below and its arguments. One launch serves them all."""
    return {
        name: globals()[function](runtime, **arguments)
        for name, (function, arguments) in jobs.items()
    }


def episodes(runtime: Runtime, config: Config, problems: list[Problem]) -> dict[str, Any]:
    """Real episodes of the model of `config`, this rank's share by problem, and the evaluation before and after."""
    tokenizer = load_tokenizer(config.model)
    engine = build_engine(config, stop_ids(config.model, tokenizer), runtime)
    engine.load_weights(pretrained_weights(config.model.path))
    with VerifierPool(10.0, 1, ("exact",)) as verifier:
        prompter = Prompter(config.prompts, tokenizer)
        pipeline = Pipeline(engine, prompter, verifier, tokenizer, config.algorithm, config.rollout)
        before = measure_accuracy(pipeline, problems[:3], 2, run_seed=7)
        tasks = [Task(each, 5, (7, 5, each.id, 0)) for each in problems]
        mine = pipeline.run(tasks)
        after = measure_accuracy(pipeline, problems[:3], 2, run_seed=7)
    return {"episodes": {each.problem.id: each for each in mine}, "before": before, "after": after}


def interruption(
    runtime: Runtime, stopped: int, after: int, tasks: int, steps: int
) -> dict[str, Any]:
    """The ranks sample `tasks` problems, exchanging every `steps` steps; rank `stopped` is asked to stop after so many
    of its engine's samples."""
    engine = ScriptedEngine(first_come)
    engine.replica = make_replica(runtime, 1)
    config = settings(rollout={"engine.exchange_steps": steps})

    def interrupted() -> bool:
        return runtime.rank == stopped and sum(kind == "done" for kind, _ in engine.events) >= after

    with VerifierPool(5.0, 1, ("exact",)) as verifier:
        pipeline = pipeline_of(engine, verifier, config, interrupted=interrupted)
        try:
            pipeline.run([task(problem(f"p{i}")) for i in range(tasks)])
            raised = False
        except Interrupted:
            raised = True
        together = gather_objects(runtime.rank)  # the ranks are still in step
    done = sum(kind == "done" for kind, _ in engine.events)
    return {"raised": raised, "together": together, "done": done, "left": engine.has_unfinished()}


class WaitsFor(ScriptedEngine):
    """Before its first step, waits for a file; or makes one before its step number `makes_at`."""

    def __init__(self, file: Path, makes_at: int | None) -> None:
        super().__init__(first_come)
        self.file, self.makes_at, self.taken = file, makes_at, 0

    def step(self) -> list[Sample]:
        self.taken += 1
        if self.taken == self.makes_at:
            self.file.touch()
        patience = time.monotonic() + 20
        while self.makes_at is None and not self.file.exists():
            if time.monotonic() > patience:
                raise TimeoutError("the other engine did not continue")
            time.sleep(0.01)
        return super().step()


def uneven(runtime: Runtime, steps: int, waits_for: Path | None = None) -> dict[str, Any]:
    """What each engine was asked for, and this rank's episodes, of problems of uneven length.

    With `waits_for` the first engine starts once the second is past LAG exchanges.
    """
    if waits_for is None:
        engine = ScriptedEngine(first_come)
    else:
        engine = WaitsFor(waits_for, LAG * steps + 1 if runtime.rank else None)
    engine.replica = make_replica(runtime, 1)
    config = settings(rollout={"engine.exchange_steps": steps, "sampling.max_context_tokens": 128})
    with VerifierPool(5.0, 1, ("exact",)) as verifier:
        pipeline = pipeline_of(engine, verifier, config)
        mine = pipeline.run(UNEVEN)
    return {
        "asked": {request.key: len(request.prompt_ids) for request in engine.requests},
        "episodes": mine,
    }


class Hesitates(ScriptedEngine):
    """Takes a time of its own for each step."""

    def __init__(self, rank: int) -> None:
        super().__init__(first_come)
        self.times = random.Random(rank)

    def step(self) -> list[Sample]:
        time.sleep(self.times.choice([0.0, 0.001, 0.02]))
        return super().step()


class LateTasks:
    """A source that keeps five tasks in flight, and has enough when four are effective, whatever is in flight."""

    def __init__(self, tasks: list[Task]) -> None:
        self.tasks, self.num_started, self.finalized = tasks, 0, dict[int, bool]()
        self.reported: list[list[int]] = []

    def finalize(self, episode: Episode) -> bool:
        return int(episode.problem.id[1:]) % 3 != 0

    def next(self, finalized: dict[int, bool]) -> list[Task] | None:
        self.finalized |= finalized
        self.reported.append(sorted(finalized))
        if sum(self.finalized.values()) >= 4:
            return None
        count = min(
            5 - (self.num_started - len(self.finalized)), len(self.tasks) - self.num_started
        )
        self.num_started += count
        return self.tasks[self.num_started - count : self.num_started]


def late_tasks(runtime: Runtime, hesitating: bool) -> dict[str, Any]:
    """A stream of tasks on two engines, which start as others are finalized, and are cancelled when enough are."""
    engine = Hesitates(runtime.rank) if hesitating else ScriptedEngine(first_come)
    engine.replica = make_replica(runtime, runtime.world_size // 2)
    source = LateTasks(
        [task(problem(f"p{i}", " ".join(["w70"] * (2 if i % 2 else 24)))) for i in range(12)]
    )
    with VerifierPool(5.0, 1, ("exact",)) as verifier:
        pipeline = pipeline_of(
            engine,
            verifier,
            settings(rollout={"engine.exchange_steps": 2, "sampling.max_context_tokens": 128}),
        )
        mine = pipeline.stream(source)
    return {
        "episodes": mine,
        "reported": source.reported,
        "events": engine.events,
        "left": engine.has_unfinished(),
    }


GRPO = AlgorithmConfig(objective="grpo", search_traces=2)
CREDIT = make_objective(GRPO).assign_credit


def collector_of(
    runtime: Runtime, num_problems: int, share: float, batch: dict[str, Any]
) -> BatchCollector:
    """A collector over a scripted pipeline."""
    pipeline: Any = ScriptedPipeline(share, GRPO, make_replica(runtime, 1))
    problems = [problem(f"p{i}") for i in range(num_problems)]
    sampler = ProblemSampler(num_problems, seed=3)
    return BatchCollector(problems, sampler, pipeline, BatchConfig(**batch), run_seed=11)


def collect(
    runtime: Runtime, num_problems: int, share: float, batch: dict[str, Any], steps: int
) -> list[dict]:
    """The batches of some steps; each with its metrics, this rank's calls and the sampler's position."""
    collector = collector_of(runtime, num_problems, share, batch)
    pipeline: Any = collector.pipeline
    results = []
    for step in range(steps):
        pipeline.calls.clear()
        collected = collector.collect(step, CREDIT)
        (call,) = pipeline.calls
        results.append(
            {
                "batch": collected,
                "calls": [each.seed_parts for each in call],
                "in_progress": pipeline.in_progress,
                "metrics": batch_metrics(collected),
                "drawn": collector.sampler.drawn,
            }
        )
    return results


def metrics_of(runtime: Runtime, parts: list[list[Trace]]) -> dict[str, float]:
    """The metrics of a batch of one episode on each rank, with parts[rank] as its searches; an empty one is none."""
    traces = parts[runtime.rank]
    sampled = [Episode(problem("p"), 0, traces, index=runtime.rank)] if traces else []
    return batch_metrics(
        Batch(
            sampled, sampled, kept_indices=[0, 3], num_prompts=8, num_effective=5, num_cancelled=2
        )
    )


def scripted_evaluation(runtime: Runtime, problems: int, repeats: int) -> dict[str, Any]:
    pipeline = ScriptedPipeline(0.5, AlgorithmConfig(search_traces=2), make_replica(runtime, 1))
    arguments = ([problem(f"p{i}") for i in range(problems)], repeats)
    results = [measure_accuracy(pipeline, *arguments, run_seed=seed) for seed in (1, 1, 2)]  # type: ignore[arg-type]
    return {
        "results": results,
        "tasks": [[each.seed_parts for each in call] for call in pipeline.calls],
    }


def filtering(
    runtime: Runtime, config: Config, output: Path, samples: int, low: float, high: float
) -> None:
    filter_by_difficulty(config, runtime, output, samples=samples, low=low, high=high)
    logging.shutdown()
