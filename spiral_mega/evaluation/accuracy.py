"""Accuracy on held-out problems during training: of search traces, of their best, and of aggregation."""

from __future__ import annotations

from collections.abc import Sequence

from spiral_mega.distributed.collectives import sum_over_ranks
from spiral_mega.rollout.episode_builder import Task
from spiral_mega.rollout.pipeline import Pipeline
from spiral_mega.traces import Problem


def measure_accuracy(
    pipeline: Pipeline, problems: Sequence[Problem], repeats: int, run_seed: int
) -> dict[str, float]:
    """Sample every held-out problem `repeats` times, and return mean rewards as metrics.

    Collective; the result is equal on all ranks. The seeds do not depend on the training step, so
    two evaluations differ only by the weights. The best of the N1 search traces is reported as
    pass@N1 (a trace passes when its reward is at least 1).
    """
    tasks = []
    for problem in problems:
        for repeat in range(repeats):
            tasks.append(Task(problem, -1, (run_seed, "eval", problem.id, repeat)))
    sums = {"search": 0.0, "pass": 0.0, "aggregation": 0.0}
    for episode in pipeline.run(tasks):
        search = [trace.reward for trace in episode.search]
        answers = [trace.reward for group in episode.aggregation for trace in group]
        sums["search"] += sum(search) / len(search)
        sums["pass"] += float(max(search) >= 1.0)
        sums["aggregation"] += sum(answers) / len(answers)
    means = {name: value / len(tasks) for name, value in sum_over_ranks(sums).items()}
    return {
        "eval/search_accuracy": means["search"],
        f"eval/pass@{pipeline.algorithm.search_traces}": means["pass"],
        "eval/aggregation_accuracy": means["aggregation"],
    }
