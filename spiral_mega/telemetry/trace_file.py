"""Parquet files of the traces of a step: exact float32 log-probs, compressed, readable by column."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spiral_mega.telemetry.atomic import atomic_path
from spiral_mega.traces import Episode, Problem, Trace

T = TypeVar("T")

EPISODES_PER_ROW_GROUP = 32  # bounds the copy in memory: about 3M tokens at 24 traces of 4,096

TRACE = pa.struct(
    {
        "component": pa.string(),
        "index": pa.int32(),
        "set_index": pa.int32(),
        "prompt_length": pa.int32(),
        "length": pa.int32(),
        "finish": pa.string(),
        "reward": pa.float64(),
        "verification": pa.string(),
        "advantage": pa.float64(),
        "gated": pa.bool_(),
        "cached_tokens": pa.int32(),
        "observation_spans": pa.list_(pa.list_(pa.int32())),
        "answer_start": pa.int32(),
        "text": pa.large_string(),
        "response_ids": pa.large_list(pa.int32()),
        "logprobs": pa.large_list(pa.float32()),
    }
)
EPISODE = pa.schema(
    {
        "step": pa.int32(),
        "index": pa.int32(),
        "problem_id": pa.string(),
        "source": pa.string(),
        "verifier": pa.string(),
        "messages": pa.list_(pa.map_(pa.string(), pa.string())),
        "answer": pa.list_(pa.string()),
        "sets": pa.list_(pa.list_(pa.int32())),
        "traces": pa.list_(TRACE),
    }
)


def trace_path(run_dir: str | Path, step: int, rank: int) -> Path:
    """Return the file of the traces of `step` that `rank` sampled."""
    return Path(run_dir) / "traces" / f"step_{step:06d}.rank{rank}.parquet"


def write_traces(path: Path, episodes: Sequence[Episode]) -> None:
    """Write one row for each episode, atomically, replacing the file of an earlier start of the
    run.

    Raises OSError as the file system does, and pyarrow's errors for a value that does not fit its
    column.
    """
    write_rows(path, episodes, episode_row, EPISODE)


def write_rows(
    path: Path, items: Sequence[T], row: Callable[[T], dict[str, Any]], schema: pa.Schema
) -> None:
    """Write one `row` for each item, atomically."""
    with (
        atomic_path(path) as hidden,
        pq.ParquetWriter(hidden, schema, compression="zstd") as writer,
    ):
        for start in range(0, len(items), EPISODES_PER_ROW_GROUP):
            rows = [row(item) for item in items[start : start + EPISODES_PER_ROW_GROUP]]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def read_traces(path: str | Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file: one dict for each episode, its traces under "traces", search
    first, then by set.

    `columns` selects columns, such as ["problem_id", "traces.list.element.reward"]. Raises
    FileNotFoundError.
    """
    table = pq.ParquetFile(path).read(columns=None if columns is None else list(columns))
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    return rows


def episode_from_row(row: dict[str, Any], prompts: Sequence[list[int]] | None = None) -> Episode:
    """Return the episode that a row of `read_traces` describes.

    `prompts` are the token ids of the search prompt and of each set's prompt, which the file leaves
    out; without them they are empty.
    """
    messages = tuple(dict(message) for message in row["messages"])
    problem = Problem(
        row["problem_id"], messages, tuple(row["answer"]), row["verifier"], row["source"]
    )
    sets = [tuple(members) for members in row["sets"]]
    episode = Episode(problem, row["step"], [], sets, index=row["index"])
    answered = any(each["set_index"] is not None for each in row["traces"])
    episode.aggregation = [[] for _ in episode.sets] if answered else []
    for each in row["traces"]:
        values = {
            name: value for name, value in each.items() if name not in ("prompt_length", "length")
        }
        values["observation_spans"] = [(start, stop) for start, stop in values["observation_spans"]]
        set_index = values["set_index"]
        prompt = [] if prompts is None else prompts[0 if set_index is None else set_index + 1]
        group = episode.search if set_index is None else episode.aggregation[set_index]
        group.append(Trace(**values, prompt_ids=prompt))
    return episode


def remove_traces(run_dir: str | Path, first_step: int) -> int:
    """Remove the traces of `first_step` and later steps, of every rank; return the number of files
    removed.

    When a run resumes on fewer ranks, the files of the missing ranks would otherwise stay among the
    new ones. Call it on one rank, before any rank writes.
    """
    removed = 0
    for path in (Path(run_dir) / "traces").glob("step_*.rank*.parquet"):
        step = re.match(r"step_(\d+)\.", path.name)
        if step and int(step[1]) >= first_step:
            path.unlink()
            removed += 1
    return removed


def episode_row(episode: Episode) -> dict[str, Any]:
    """Return the row of an episode in a trace file."""
    return {
        "step": episode.step,
        "index": episode.index,
        "problem_id": episode.problem.id,
        "source": episode.problem.source,
        "verifier": episode.problem.verifier,
        "messages": [list(message.items()) for message in episode.problem.messages],
        "answer": list(episode.problem.answer),
        "sets": [list(members) for members in episode.sets],
        "traces": [_trace_row(trace) for trace in episode.traces()],
    }


def _trace_row(trace: Trace) -> dict[str, Any]:
    row = {field.name: getattr(trace, field.name) for field in fields(trace)}
    row["prompt_length"] = len(row.pop("prompt_ids"))
    # Arrays convert to Arrow ten times faster than lists.
    row["response_ids"] = np.asarray(trace.response_ids, dtype=np.int32)
    row["logprobs"] = np.asarray(trace.logprobs, dtype=np.float32)
    return row | {"length": trace.length}
