"""The analysis of training traces is that of the episodes that were written."""

import json

import pytest

from spiral_mega.analysis import aggregate, episode_stats
from spiral_mega.analysis.training_traces import analyze_training, read_episodes
from spiral_mega.errors import UserError
from spiral_mega.telemetry.trace_file import trace_path, write_traces
from tests.analysis.episodes import episode, right, wrong


def written(texts, rewards):
    made, _ = episode(
        [right() if reward else wrong() for reward in rewards], [(0, 1)], [[right()] * 2]
    )
    for trace, text in zip(made.traces(), texts, strict=True):
        trace.text = text
    return made


def test_spans_of_steps_are_summarized_with_answers_grouped_by_kind(tmp_path):
    first = written(["a", "b", "a", "a"], [True, False])
    last = written(["a", "a", "a", "c"], [True, True])
    for step, rank, made in ((1, 0, first), (1, 1, first), (2, 0, last), (7, 0, last)):
        write_traces(trace_path(tmp_path, step, rank), [made])
    found = analyze_training(tmp_path, points=3, seed=0, time_limit_s=5.0, workers=1)
    assert [(each["first"], each["last"], each["episodes"]) for each in found["points"]] == [
        (1, 1, 2),
        (2, 2, 1),
        (7, 7, 1),
    ]
    by_hand = aggregate([episode_stats(first, [0, 1, 0, 0])] * 2, 0)
    assert {name: found["points"][0][name] for name in by_hand} == by_hand
    assert json.loads((tmp_path / "analysis.json").read_text()) == json.loads(json.dumps(found))


def test_an_episode_comes_back_as_it_was_but_for_its_prompts(tmp_path):
    made = written(["a", "b", "a", "a"], [True, False])
    write_traces(tmp_path / "x.parquet", [made])
    assert list(read_episodes(tmp_path / "x.parquet")) == [made]


def test_a_run_without_traces_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no traces"):
        analyze_training(tmp_path, points=1, seed=0, time_limit_s=1.0, workers=1)
