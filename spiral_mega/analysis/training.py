"""The analysis of a run's training traces, over its steps."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from spiral_mega.analysis import episode_stats, summarise
from spiral_mega.errors import UserError
from spiral_mega.rewards import VerifierPool, group_answers
from spiral_mega.telemetry import write_json_atomic
from spiral_mega.telemetry.trace_file import episode_from_row, read_traces
from spiral_mega.traces import Episode

log = logging.getLogger(__name__)

STEP = re.compile(r"step_(\d+)\.rank\d+\.parquet")


def trace_files(run_dir: Path) -> dict[int, list[Path]]:
    """The files of traces of each step, in order. Raises UserError if the run has none."""
    found: dict[int, list[Path]] = {}
    for path in sorted((run_dir / "traces").glob("step_*.rank*.parquet")):
        if match := STEP.fullmatch(path.name):
            found.setdefault(int(match[1]), []).append(path)
    if not found:
        raise UserError(f"{run_dir} holds no traces (traces/step_*.parquet): train with telemetry.traces=true")
    return dict(sorted(found.items()))


def episodes_in(path: Path) -> Iterator[Episode]:
    """The episodes of one file of traces, without prompts. Raises UserError if it is no such file."""
    try:
        yield from map(episode_from_row, read_traces(path))
    except (OSError, pa.ArrowException, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read as traces ({type(error).__name__}: {error})") from error


def analyse_training(run_dir: Path, *, points: int, seed: int, time_limit_s: float, workers: int) -> dict[str, Any]:
    """Write run_dir/analysis.json: {"points": [{"first", "last", "episodes", <part>: summary}, ...]}, and return it.

    The run's steps are put together to at most `points` spans of equal length, each summarised by itself.
    """
    files = trace_files(run_dir)
    steps = list(files)
    spans = [steps[i * len(steps) // points : (i + 1) * len(steps) // points] for i in range(points)]
    found = []
    with VerifierPool(time_limit_s, workers, ()) as verifier:
        for span in filter(None, spans):
            facts = []
            for path in (path for step in span for path in files[step]):
                for episode in episodes_in(path):
                    texts = [trace.answer_text for trace in episode.traces()]
                    facts.append(episode_stats(episode, group_answers(texts, episode.problem.verifier, verifier)))
            found.append({"first": span[0], "last": span[-1], "episodes": len(facts), **summarise(facts, seed)})
            log.info("steps %d to %d: %d episodes", span[0], span[-1], len(facts))
    analysis = {"points": found}
    write_json_atomic(run_dir / "analysis.json", analysis)
    return analysis
