"""Problems from the sources that a configuration names."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from spiral_mega.config.schema import DataSource
from spiral_mega.data.errors import DataError
from spiral_mega.data.filters import filter_overlong
from spiral_mega.data.readers import open_source
from spiral_mega.data.schemas import choose_adapter, problem_row
from spiral_mega.rewards.registry import check_verifier_name
from spiral_mega.traces import Problem

logger = logging.getLogger(__name__)


def load_source(source: DataSource) -> list[Problem]:
    """All problems of one source, in its order; the first `source.limit` of them when that is set.

    An id is the row's own `id`, or "<source name>/<row, from 0>": it stays the same as long as the source does.
    Raises DataError at the first bad row (naming file and row), for two rows of one id, and for an empty source.
    """
    raw = open_source(source)
    rows = list(islice(raw.rows, source.limit))
    if not rows:
        raise DataError(f"{source.path}: holds no rows: correct the path, or leave the source out")
    adapt = choose_adapter(rows)
    problems: list[Problem] = []
    places: dict[str, str] = {}
    for index, (place, row) in enumerate(rows):
        try:
            problem = adapt(row, raw.name, f"{raw.name}/{index}", source.verifier)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        if problem.id in places:
            raise DataError(f"{place}: id {problem.id!r} is also that of {places[problem.id]}: make ids unique")
        places[problem.id] = place
        problems.append(problem)
    logger.info(
        "%s: %d problems in the %s schema, %d rows left out by limit",
        source.path,
        len(problems),
        adapt.__name__,
        raw.total - len(problems),
    )
    return problems


def load_sources(sources: Sequence[DataSource]) -> list[Problem]:
    """The problems of all sources, one after the other. Raises DataError when two sources share an id."""
    problems: list[Problem] = []
    owners: dict[str, str] = {}
    for source in sources:
        for problem in load_source(source):
            if problem.id in owners:
                raise DataError(
                    f"{source.path}: id {problem.id!r} is also in {owners[problem.id]}: list a source once, "
                    "and rename files of one name or give their rows ids"
                )
            owners[problem.id] = source.path
            problems.append(problem)
    return problems


def fingerprint(problems: Iterable[Problem]) -> str:
    """SHA-256, in hex, over every field of every problem, in order: equal exactly when the data is the same."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(json.dumps(problem_row(problem), sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def load_problems(
    sources: Sequence[DataSource], search_prompt: Callable[[Problem], list[int]], max_prompt_tokens: int
) -> list[Problem]:
    """The problems of `sources` whose prompt fits, with their verifiers checked."""
    problems = load_sources(sources)
    for kind, problem in {problem.verifier: problem for problem in problems}.items():
        try:
            check_verifier_name(kind)
        except ValueError as error:
            raise DataError(f"problem {problem.id!r} of {problem.source}: {error}") from error
    kept, _ = filter_overlong(problems, search_prompt, max_prompt_tokens)
    return kept
