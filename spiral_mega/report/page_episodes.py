"""Episodes of the report page: an index that is always loaded, and blocks unpacked on demand.

index entry {id, title, origin, mean rewards, flags, block, position}
    --> blocks[block][position], the whole episode
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from spiral_mega.errors import UserError
from spiral_mega.traces import ADVANTAGE_EPS, SEARCH

EPISODES_PER_BLOCK = 16
MAX_TITLE_CHARS = 160
MAX_TEXT_CHARS = 12_000
STEP_FILE = re.compile(r"step_0*(\d+)\.")
EPISODE_COLUMNS = ("problem_id", "messages", "answer", "sets")
TRACE_COLUMNS = (
    *("component", "index", "set_index", "reward", "verification"),
    *("advantage", "gated", "finish", "length", "text"),
)
COLUMNS = [*EPISODE_COLUMNS, *(f"traces.list.element.{name}" for name in TRACE_COLUMNS)]


class EpisodeFlag(IntFlag):
    """What the page filters episodes by; the order is that of FLAGS in static/episodes.js."""

    EFFECTIVE = 1
    GATED = 2
    TRUNCATED = 4
    FAILED_VERIFICATION = 8


@dataclass
class EpisodeBlocks:
    """Whole episodes in blocks of a few, numbered over all runs of the report."""

    blocks: list[list[dict[str, Any]]] = field(default_factory=list)

    def add(self, episode: dict[str, Any]) -> tuple[int, int]:
        """Append an episode; return its block and its position there."""
        if not self.blocks or len(self.blocks[-1]) == EPISODES_PER_BLOCK:
            self.blocks.append([])
        self.blocks[-1].append(episode)
        return len(self.blocks) - 1, len(self.blocks[-1]) - 1


class EpisodeIndex(NamedTuple):
    """The index entries of a run's episodes, and how many episodes were left out."""

    entries: list[dict[str, Any]]
    left_out: int


class TraceGroup(NamedTuple):
    """Trace files that are sampled evenly as one: of the training, or of one evaluation sampling."""

    trained: bool
    files: list[Path]


def index_episodes(folder: Path, blocks: EpisodeBlocks, max_traces: int) -> EpisodeIndex:
    """Add evenly spaced episodes of a run to `blocks`, and return their index.

    They have at most `max_traces` traces. The groups of trace files share `max_traces` equally.
    """
    groups = _trace_groups(folder)
    entries: list[dict[str, Any]] = []
    left_out = 0
    for group in groups:
        counts = [_count_episodes(path) for path in group.files]
        total = sum(counts)
        if not total:
            continue
        traces_per_episode = _traces_of_first_episode(group.files, counts)
        wanted = min(total, max(1, max_traces // len(groups) // max(1, traces_per_episode)))
        chosen = [i * total // wanted for i in range(wanted)]
        left_out += total - wanted
        first = 0  # of the file, in the group
        for path, count in zip(group.files, counts, strict=True):
            rows = [at - first for at in chosen if first <= at < first + count]
            first += count
            origin = _origin(path, folder, group.trained)
            for row in _read_rows(path, rows):
                entries.append(_add_episode(row, origin, group.trained, blocks))
    return EpisodeIndex(entries, left_out)


def _trace_groups(folder: Path) -> list[TraceGroup]:
    """Return the groups that have files, the training first."""
    groups = [TraceGroup(True, sorted((folder / "traces").glob("step_*.parquet")))]
    samplings = {
        path.parent
        for path in folder.rglob("chunk_*.parquet")
        if path.parent.parent.name == "traces"
    }
    for sampling in sorted(samplings):
        groups.append(TraceGroup(False, sorted(sampling.glob("chunk_*.parquet"))))
    return [group for group in groups if group.files]


def _traces_of_first_episode(files: Sequence[Path], counts: Sequence[int]) -> int:
    path = next(path for path, count in zip(files, counts, strict=True) if count)
    (episode,) = _read_rows(path, [0])
    return len(episode["traces"])


def _count_episodes(path: Path) -> int:
    try:
        return int(pq.ParquetFile(path).metadata.num_rows)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _read_rows(path: Path, rows: list[int]) -> Iterator[dict[str, Any]]:
    """Read the episodes in these rows of a file."""
    if not rows:
        return
    try:
        table = pq.ParquetFile(path).read(columns=COLUMNS).take(rows)
        yield from table.to_pylist(maps_as_pydicts="strict")
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read as traces ({error}): remove it, or make it again")


def _origin(path: Path, folder: Path, trained: bool) -> str:
    """Name the step or the evaluation and sampling that a trace file is of."""
    step = STEP_FILE.match(path.name)
    if trained and step:
        return f"step {step[1]}"
    evaluation = path.parent.parent.parent
    parts = evaluation.relative_to(folder).parts or ("evaluation",)
    return " ".join([*parts, path.parent.name])


def _add_episode(
    row: dict[str, Any], origin: str, trained: bool, blocks: EpisodeBlocks
) -> dict[str, Any]:
    """Add an episode to the blocks, and return its index entry."""
    traces = row["traces"]
    block, position = blocks.add(
        {
            "messages": row["messages"],
            "answer": row["answer"],
            "sets": row["sets"],
            "traces": [_page_trace(trace, trained) for trace in traces],
        }
    )
    return {
        "id": row["problem_id"],
        "title": " ".join(row["messages"][-1]["content"].split())[:MAX_TITLE_CHARS],
        "origin": origin,
        "search": _mean([trace["reward"] for trace in traces if trace["component"] == SEARCH]),
        "aggregation": _mean([trace["reward"] for trace in traces if trace["component"] != SEARCH]),
        "flags": int(_flags(traces)),
        "block": block,
        "position": position,
    }


def _mean(rewards: Sequence[float]) -> float | None:
    return sum(rewards) / len(rewards) if rewards else None


def _flags(traces: Sequence[dict[str, Any]]) -> EpisodeFlag:
    flags = EpisodeFlag(0)
    for trace in traces:
        if abs(trace["advantage"]) > ADVANTAGE_EPS:
            flags |= EpisodeFlag.EFFECTIVE
        if trace["gated"]:
            flags |= EpisodeFlag.GATED
        if trace["finish"] == "length":
            flags |= EpisodeFlag.TRUNCATED
        if trace["verification"] != "ok":
            flags |= EpisodeFlag.FAILED_VERIFICATION
    return flags


def _page_trace(trace: dict[str, Any], trained: bool) -> dict[str, Any]:
    """Return what the page shows of a trace; an evaluation assigns no advantage."""
    return {
        "index": trace["index"],
        "set": trace["set_index"],
        "reward": trace["reward"],
        "advantage": trace["advantage"] if trained else None,
        "length": trace["length"],
        "finish": trace["finish"],
        "gated": trace["gated"],
        "verification": trace["verification"],
        "text": shorten(trace["text"]),
    }


def shorten(text: str) -> str:
    """Leave out the middle of a long text, and state how much of it is missing."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters not shown ...]\n{text[-half:]}"
