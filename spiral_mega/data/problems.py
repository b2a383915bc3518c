"""Load the problems of the sources that a configuration names."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from spiral_mega.config.schema import DataSource
from spiral_mega.data.readers import open_source
from spiral_mega.data.schemas import choose_adapter, problem_row
from spiral_mega.errors import DataError
from spiral_mega.rewards.registry import check_verifier_name
from spiral_mega.traces import Problem

logger = logging.getLogger(__name__)

SearchPrompt = Callable[[Problem], list[int]]


def load_problems(
    sources: Sequence[DataSource], search_prompt: SearchPrompt, max_prompt_tokens: int
) -> list[Problem]:
    """Load the problems of `sources` whose search prompt fits, and check their verifiers. Raises DataError."""
    problems = load_sources(sources)
    examples = {problem.verifier: problem for problem in problems}
    for verifier, problem in examples.items():
        try:
            check_verifier_name(verifier)
        except ValueError as error:
            raise DataError(f"problem {problem.id!r} of {problem.source}: {error}") from error
    kept, _ = filter_overlong(problems, search_prompt, max_prompt_tokens)
    return kept


def load_sources(sources: Sequence[DataSource]) -> list[Problem]:
    """Load the problems of all sources, in order. Raises DataError when two sources share an id."""
    problems: list[Problem] = []
    source_of: dict[str, str] = {}
    for source in sources:
        for problem in load_source(source):
            if problem.id in source_of:
                raise DataError(
                    f"{source.path}: id {problem.id!r} is also in {source_of[problem.id]}: list a "
                    "source once, and rename files of one name or give their rows ids"
                )
            source_of[problem.id] = source.path
            problems.append(problem)
    return problems


def load_source(source: DataSource) -> list[Problem]:
    """Load all problems of one source, in its order; the first `source.limit` of them when that is
    set.

    An id is the row's own `id`, or "<source name>/<row, from 0>", so that it stays the same as long
    as the source does. Raises DataError at the first bad row (naming file and row), for two rows of
    one id, and for an empty source.
    """
    raw = open_source(source)
    rows = list(islice(raw.rows, source.limit))
    if not rows:
        raise DataError(f"{source.path}: holds no rows: correct the path, or leave the source out")
    adapt = choose_adapter(rows)
    problems: list[Problem] = []
    location_of: dict[str, str] = {}
    for index, (location, row) in enumerate(rows):
        try:
            problem = adapt(row, raw.name, f"{raw.name}/{index}", source.verifier)
        except DataError as error:
            raise DataError(f"{location}: {error}") from error
        if problem.id in location_of:
            raise DataError(
                f"{location}: id {problem.id!r} is also that of {location_of[problem.id]}: make ids unique"
            )
        location_of[problem.id] = location
        problems.append(problem)
    logger.info(
        "%s: %d problems in the %s schema, %d rows left out by limit",
        source.path,
        len(problems),
        adapt.__name__,
        raw.total - len(problems),
    )
    return problems


def filter_overlong(
    problems: Sequence[Problem], search_prompt: SearchPrompt, max_prompt_tokens: int
) -> tuple[list[Problem], int]:
    """Return the problems with at most `max_prompt_tokens` prompt tokens, in order, and the number
    left out.

    A prompt is never truncated: a truncated problem is another problem. `search_prompt` returns a
    problem's token ids, as `Prompter.search_prompt` does. Raises DataError when no problem is left.
    """
    lengths = [len(search_prompt(problem)) for problem in problems]
    if 0 in lengths:
        raise DataError(
            f"the prompt of problem {problems[lengths.index(0)].id!r} has no tokens: the tokenizer "
            "is empty, or its chat template drops the messages; check model.tokenizer"
        )
    kept = [
        problem
        for problem, length in zip(problems, lengths, strict=True)
        if length <= max_prompt_tokens
    ]
    if not kept:
        shortest = (
            f"the shortest prompt has {min(lengths)} tokens"
            if lengths
            else "there were none to begin with"
        )
        raise DataError(
            f"data.max_prompt_tokens is {max_prompt_tokens}, which leaves none of {len(lengths)} "
            f"problems ({shortest}): raise data.max_prompt_tokens, or check prompts and data"
        )
    left_out = len(problems) - len(kept)
    logger.info(
        "%d of %d problems left out: prompt above %d tokens",
        left_out,
        len(problems),
        max_prompt_tokens,
    )
    return kept, left_out


def fingerprint(problems: Iterable[Problem]) -> str:
    """Return the SHA-256, in hex, of every field of every problem, in order: equal exactly when the data is."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(
            json.dumps(problem_row(problem), sort_keys=True, separators=(",", ":")).encode() + b"\n"
        )
    return digest.hexdigest()
