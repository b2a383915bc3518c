"""`spiral-mega analyze`: the analysis of a run's training traces, over its steps."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from spiral_mega.analysis import aggregate, episode_stats
from spiral_mega.errors import UserError
from spiral_mega.rewards import VerifierPool, group_answers
from spiral_mega.telemetry import write_json_atomic
from spiral_mega.telemetry.trace_file import episode_from_row, read_traces
from spiral_mega.traces import Episode

log = logging.getLogger(__name__)

TRACE_FILE = re.compile(r"step_(\d+)\.rank\d+\.parquet")


def trace_files(run_dir: Path) -> dict[int, list[Path]]:
    """Return the trace files of each step, in order. Raises UserError if the run has none."""
    files: dict[int, list[Path]] = {}
    for path in sorted((run_dir / "traces").glob("step_*.rank*.parquet")):
        match = TRACE_FILE.fullmatch(path.name)
        if match:
            files.setdefault(int(match[1]), []).append(path)
    if not files:
        raise UserError(
            f"{run_dir} holds no traces (traces/step_*.parquet): train with telemetry.traces=true"
        )
    return dict(sorted(files.items()))


def read_episodes(path: Path) -> Iterator[Episode]:
    """Read the episodes of a trace file, without prompts. Raises UserError for any other file."""
    try:
        yield from map(episode_from_row, read_traces(path))
    except (OSError, pa.ArrowException, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read as traces ({type(error).__name__}: {error})"
        ) from error


def analyze_training(
    run_dir: Path, *, points: int, seed: int, time_limit_s: float, workers: int
) -> dict[str, Any]:
    """Analyze the traces of a run, write the result to run_dir/analysis.json, and return it.

    The result is {"points": [{"first", "last", "episodes", <part>: summary}, ...]}: the run's steps
    are divided into at most `points` spans of equal length, and each span is summarized on its own.
    """
    files = trace_files(run_dir)
    steps = list(files)
    spans = [
        steps[i * len(steps) // points : (i + 1) * len(steps) // points] for i in range(points)
    ]
    summaries = []
    with VerifierPool(time_limit_s, workers, ()) as verifier:
        for span in filter(None, spans):
            paths = [path for step in span for path in files[step]]
            stats = _stats_of_files(paths, verifier)
            summaries.append(
                {
                    "first": span[0],
                    "last": span[-1],
                    "episodes": len(stats),
                    **aggregate(stats, seed),
                }
            )
            log.info("steps %d to %d: %d episodes", span[0], span[-1], len(stats))
    analysis = {"points": summaries}
    write_json_atomic(run_dir / "analysis.json", analysis)
    return analysis


def _stats_of_files(paths: Sequence[Path], verifier: VerifierPool) -> list[dict[str, Any]]:
    stats = []
    for path in paths:
        for episode in read_episodes(path):
            answers = [trace.answer_text for trace in episode.traces()]
            groups = group_answers(answers, episode.problem.verifier, verifier)
            stats.append(episode_stats(episode, groups))
    return stats
