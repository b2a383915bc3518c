"""Keep the problems that a model solves sometimes: only those carry a learning signal."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from spiral_mega.data.schemas import problem_row
from spiral_mega.errors import DataError
from spiral_mega.telemetry.atomic import atomic_path
from spiral_mega.traces import Problem

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DifficultySplit:
    """The problems kept, in order, and the numbers of those left out as too hard and too easy."""

    kept: list[Problem]
    too_hard: int
    too_easy: int


def check_bounds(low: float, high: float) -> None:
    """Raise DataError unless some mean reward lies between the bounds."""
    if not low < high:
        raise DataError(f"low is {low} and high is {high}: low must be below high")


def check_output(path: Path) -> None:
    """Raise DataError unless `write_problems` can write to `path`."""
    if path.suffix != ".jsonl":
        raise DataError(f"{path}: problems are written as JSONL: end the name with .jsonl")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{path.parent}: cannot be made ({error.strerror}): choose another output"
        ) from error
    if path.is_dir():
        raise DataError(f"{path}: is a folder: name a file")


def split_by_difficulty(
    problems: Sequence[Problem],
    rewards: Mapping[str, Sequence[float]],
    low: float = 0.0,
    high: float = 1.0,
) -> DifficultySplit:
    """Keep the problems with low < mean reward < high; both bounds are exclusive.

    `rewards` holds, for each problem's id, the rewards of its samples (one or more). Raises
    DataError for empty bounds, for rewards that are missing or not finite, and for rewards of an
    unknown problem.
    """
    check_bounds(low, high)
    unknown = sorted(set(rewards) - {problem.id for problem in problems})
    if unknown:
        raise DataError(
            f"{len(unknown)} ids have rewards but no problem, such as {unknown[0]!r}: use one data set"
        )
    kept: list[Problem] = []
    too_hard = too_easy = 0
    for problem in problems:
        samples = rewards.get(problem.id, ())
        if not samples or not all(map(math.isfinite, samples)):
            raise DataError(
                f"problem {problem.id!r} has rewards {list(samples)}: sample it at least once, finitely"
            )
        mean = fmean(samples)
        if mean <= low:
            too_hard += 1
        elif mean >= high:
            too_easy += 1
        else:
            kept.append(problem)
    logger.info("%d problems kept, %d too hard, %d too easy", len(kept), too_hard, too_easy)
    return DifficultySplit(kept, too_hard, too_easy)


def write_problems(problems: Sequence[Problem], path: str | Path) -> int:
    """Write JSONL that `load_source` reads back to equal problems; return their number.

    The file appears whole or not at all. Raises DataError when the path is not .jsonl or there is
    no problem.
    """
    path = Path(path)
    check_output(path)
    if not problems:
        raise DataError(
            f"{path}: no problem to write: widen the bounds, or check the data and the rewards"
        )
    with atomic_path(path) as hidden, hidden.open("w", encoding="utf-8", newline="\n") as file:
        for problem in problems:
            file.write(json.dumps(problem_row(problem), ensure_ascii=False) + "\n")
    logger.info("%d problems written to %s", len(problems), path)
    return len(problems)
