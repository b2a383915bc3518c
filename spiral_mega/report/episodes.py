"""Episodes for the report's browser: an index that is always there, and blocks of whole ones for when one is seen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spiral_mega.errors import UserError
from spiral_mega.traces import ADVANTAGE_EPS, SEARCH

EPISODES_A_BLOCK = 16
TITLE_CHARS = 160
TEXT_CHARS = 12_000
EFFECTIVE, GATED, CUT, FAILED = 1, 2, 4, 8
STEP = re.compile(r"step_0*(\d+)\.")
COLUMNS = [
    *("problem_id", "messages", "answer", "sets"),
    *(f"traces.list.element.{name}" for name in ("component", "index", "set_index", "reward", "verification")),
    *(f"traces.list.element.{name}" for name in ("advantage", "gated", "finish", "length", "text")),
]


@dataclass
class Blocks:
    """Whole episodes in blocks of a few, numbered over all runs of the report."""

    blocks: list[list[dict[str, Any]]] = field(default_factory=list)

    def add(self, episode: dict[str, Any]) -> tuple[int, int]:
        """Where it went: block and place."""
        if not self.blocks or len(self.blocks[-1]) == EPISODES_A_BLOCK:
            self.blocks.append([])
        self.blocks[-1].append(episode)
        return len(self.blocks) - 1, len(self.blocks[-1]) - 1


def collect_episodes(folder: Path, blocks: Blocks, max_traces: int) -> tuple[list[dict[str, Any]], int]:
    """The index of a run's episodes and how many were left out to keep to `max_traces`: those kept are evenly spaced.

    Its groups, which share `max_traces`, are the training and each sampling of each evaluation.
    """
    groups = _groups(folder)
    index, left_out = [], 0
    for trained, files in groups:
        counts = [_rows(path) for path in files]
        total = sum(counts)
        if not total:
            continue
        (first,) = _read(next(path for path, count in zip(files, counts, strict=True) if count), [0])
        wanted = min(total, max(1, max_traces // len(groups) // max(1, len(first["traces"]))))
        chosen = [i * total // wanted for i in range(wanted)]
        left_out += total - wanted
        start = 0
        for path, count in zip(files, counts, strict=True):
            here = [at - start for at in chosen if start <= at < start + count]
            start += count
            for row in _read(path, here):
                index.append(_entry(row, _origin(path, folder, trained), trained, blocks))
    return index, left_out


def _groups(folder: Path) -> list[tuple[bool, list[Path]]]:
    """(whether it is training, its files in order) of each group that has files."""
    groups = [(True, sorted((folder / "traces").glob("step_*.parquet")))]
    samplings = sorted({path.parent for path in folder.rglob("chunk_*.parquet") if path.parent.parent.name == "traces"})
    groups += [(False, sorted(sampling.glob("chunk_*.parquet"))) for sampling in samplings]
    return [(trained, files) for trained, files in groups if files]


def _rows(path: Path) -> int:
    try:
        return int(pq.ParquetFile(path).metadata.num_rows)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read as traces ({error}): remove it, or make it again") from error


def _read(path: Path, rows: list[int]) -> Iterator[dict[str, Any]]:
    """These rows of a file."""
    if not rows:
        return
    try:
        table = pq.ParquetFile(path).read(columns=COLUMNS).take(rows)
        yield from table.to_pylist(maps_as_pydicts="strict")
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read as traces ({error}): remove it, or make it again") from error


def _origin(path: Path, folder: Path, trained: bool) -> str:
    if trained and (match := STEP.match(path.name)):
        return f"step {match[1]}"
    evaluation = path.parent.parent.parent
    return " ".join([*(evaluation.relative_to(folder).parts or ("evaluation",)), path.parent.name])


def _entry(row: dict[str, Any], origin: str, trained: bool, blocks: Blocks) -> dict[str, Any]:
    """The index entry of an episode, which goes to the blocks."""
    traces = row["traces"]
    block, place = blocks.add(
        {
            "messages": row["messages"],
            "answer": row["answer"],
            "sets": row["sets"],
            "traces": [_trace(trace, trained) for trace in traces],
        }
    )
    search = [trace["reward"] for trace in traces if trace["component"] == SEARCH]
    answers = [trace["reward"] for trace in traces if trace["component"] != SEARCH]
    return {
        "id": row["problem_id"],
        "title": " ".join(row["messages"][-1]["content"].split())[:TITLE_CHARS],
        "origin": origin,
        "search": sum(search) / len(search) if search else None,
        "aggregation": sum(answers) / len(answers) if answers else None,
        "flags": (EFFECTIVE if any(abs(trace["advantage"]) > ADVANTAGE_EPS for trace in traces) else 0)
        | (GATED if any(trace["gated"] for trace in traces) else 0)
        | (CUT if any(trace["finish"] == "length" for trace in traces) else 0)
        | (FAILED if any(trace["verification"] != "ok" for trace in traces) else 0),
        "block": block,
        "place": place,
    }


def _trace(trace: dict[str, Any], trained: bool) -> dict[str, Any]:
    """A trace by short names; an evaluation assigns no advantage."""
    return {
        "i": trace["index"],
        "s": trace["set_index"],
        "r": trace["reward"],
        "a": trace["advantage"] if trained else None,
        "l": trace["length"],
        "e": trace["finish"],
        "g": trace["gated"],
        "v": trace["verification"],
        "t": shown_text(trace["text"]),
    }


def shown_text(text: str) -> str:
    """A long text without its middle, and how much of it is missing."""
    if len(text) <= TEXT_CHARS:
        return text
    half = TEXT_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters not shown ...]\n{text[-half:]}"
