from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from spiral_mega.telemetry.trace_file import (
    TRACE,
    read_traces,
    remove_traces,
    trace_path,
    write_traces,
)
from spiral_mega.traces import AGGREGATION, SEARCH, Episode, Problem, Trace


def trace(component: str, index: int, set_index: int | None = None) -> Trace:
    return Trace(
        component=component,
        index=index,
        set_index=set_index,
        prompt_ids=[1, 2, 3],
        response_ids=[151_000 + index, 7],
        logprobs=[-0.1, -1e-7],
        finish="length",
        text='x = "½"\n',
        reward=0.5,
        verification="timeout",
        advantage=-0.125,
        gated=True,
        cached_tokens=2,
        observation_spans=[(1, 2)],
        answer_start=4,
    )


def episode(step: int, problem_id: str = "p") -> Episode:
    return Episode(
        problem=Problem(
            id=problem_id,
            messages=(
                {"role": "system", "content": "s", "name": "n"},
                {"role": "user", "content": "2+2?"},
            ),
            answer=("4", "four"),
            verifier="math",
        ),
        step=step,
        search=[trace(SEARCH, i) for i in range(3)],
        sets=[(0, 2), (1, 2)],
        aggregation=[[trace(AGGREGATION, i, s) for i in range(2)] for s in range(2)],
        index=5,
    )


def test_traces_are_read_back_unchanged(tmp_path: Path) -> None:
    path = trace_path(tmp_path, 12, 3)
    assert path.name == "step_000012.rank3.parquet"
    write_traces(path, [episode(12, f"p{i}") for i in range(70)])
    rows = read_traces(path)
    assert [row["problem_id"] for row in rows] == [f"p{i}" for i in range(70)]
    row = rows[0]
    assert (row["step"], row["index"], row["verifier"]) == (12, 5, "math")
    assert row["answer"] == ["4", "four"]
    assert row["sets"] == [[0, 2], [1, 2]]
    assert row["messages"][0] == {"role": "system", "content": "s", "name": "n"}
    assert [(t["component"], t["set_index"], t["index"]) for t in row["traces"]] == [
        (SEARCH, None, 0), (SEARCH, None, 1), (SEARCH, None, 2),
        (AGGREGATION, 0, 0), (AGGREGATION, 0, 1), (AGGREGATION, 1, 0), (AGGREGATION, 1, 1),
    ]  # fmt: skip
    first = row["traces"][0]
    assert first.pop("logprobs") == np.array([-0.1, -1e-7], dtype=np.float32).tolist()
    assert first == {
        "component": SEARCH, "index": 0, "set_index": None, "prompt_length": 3, "length": 1, "finish": "length",
        "reward": 0.5, "verification": "timeout", "advantage": -0.125, "gated": True, "cached_tokens": 2,
        "text": 'x = "½"\n', "response_ids": [151_000, 7], "observation_spans": [[1, 2]], "answer_start": 4,
    }  # fmt: skip


def test_every_field_of_a_trace_has_a_column() -> None:
    kept = {column.name for column in TRACE}
    assert {field.name for field in fields(Trace)} - kept == {
        "prompt_ids"
    }  # which the problem and the sets determine


def test_single_columns_can_be_read(tmp_path: Path) -> None:
    path = trace_path(tmp_path, 1, 0)
    write_traces(path, [episode(1)])
    columns = ["problem_id", "traces.list.element.reward"]
    assert read_traces(path, columns) == [{"problem_id": "p", "traces": [{"reward": 0.5}] * 7}]


def test_a_step_computed_again_replaces_its_file(tmp_path: Path) -> None:
    path = trace_path(tmp_path, 1, 0)
    write_traces(path, [episode(1, "old")])
    write_traces(path, [episode(1, "new")])
    assert [row["problem_id"] for row in read_traces(path)] == ["new"]


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    broken = episode(1)
    broken.search[0].text = 3  # type: ignore[assignment]
    with pytest.raises(Exception, match="int"):
        write_traces(trace_path(tmp_path, 1, 0), [broken])
    assert not list((tmp_path / "traces").iterdir())


def test_a_rank_without_episodes_writes_a_readable_file(tmp_path: Path) -> None:
    write_traces(trace_path(tmp_path, 1, 0), [])
    assert read_traces(trace_path(tmp_path, 1, 0)) == []


def test_a_run_resumed_on_fewer_ranks_keeps_no_traces_of_lost_steps(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        for rank in (0, 1):
            write_traces(trace_path(tmp_path, step, rank), [episode(step)])
    assert remove_traces(tmp_path, first_step=2) == 4
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "step_000001.rank0.parquet",
        "step_000001.rank1.parquet",
    ]
