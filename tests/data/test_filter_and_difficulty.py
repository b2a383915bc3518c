"""Problems left out are counted, never truncated; problems kept are read back from disk unchanged."""

import json
import logging
from pathlib import Path

import pytest

from spiral_mega.config.schema import DataSource
from spiral_mega.data.difficulty import split_by_difficulty, write_problems
from spiral_mega.data.problems import filter_overlong, fingerprint, load_source
from spiral_mega.errors import DataError
from spiral_mega.traces import Problem

SAMPLES = Path(__file__).parent / "samples"


def words(problem: Problem) -> list[int]:
    return list(range(len(problem.messages[-1]["content"].split())))


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return load_source(DataSource(path=str(SAMPLES / "aime24.parquet")))


def test_the_longest_prompt_allowed_is_kept_and_one_token_more_is_not(problems, caplog):
    caplog.set_level(logging.INFO)
    lengths = sorted(len(words(problem)) for problem in problems)
    limit = lengths[len(lengths) // 2]
    kept, left_out = filter_overlong(problems, words, limit)
    assert max(len(words(problem)) for problem in kept) == limit
    assert left_out == sum(length > limit for length in lengths) == len(problems) - len(kept)
    assert [p for p in problems if p in kept] == kept, "the order stays"
    assert f"{left_out} of 30 problems left out: prompt above {limit} tokens" in caplog.text


def test_a_limit_that_leaves_no_problem_is_an_error_that_names_the_shortest(problems):
    shortest = min(len(words(problem)) for problem in problems)
    with pytest.raises(
        DataError, match=rf"max_prompt_tokens is 3, .* none of 30 problems .* {shortest} tokens"
    ):
        filter_overlong(problems, words, 3)


def test_only_means_strictly_between_the_bounds_are_kept(problems):
    four = problems[:4]
    rewards = dict(
        zip([p.id for p in four], [[0, 0], [0, 1, 0, 0], [1, 1, 1], [1, 0]], strict=True)
    )
    split = split_by_difficulty(four, rewards)
    assert (split.kept, split.too_hard, split.too_easy) == ([four[1], four[3]], 1, 1)
    split = split_by_difficulty(four, rewards, low=0.25, high=0.75)
    assert (split.kept, split.too_hard, split.too_easy) == ([four[3]], 2, 1)


def test_rewards_that_do_not_fit_the_problems_are_errors(problems):
    one = problems[:1]
    with pytest.raises(DataError, match="'aime24/0' has rewards \\[\\]"):
        split_by_difficulty(one, {})
    with pytest.raises(DataError, match="finitely"):
        split_by_difficulty(one, {"aime24/0": [float("nan")]})
    with pytest.raises(DataError, match="1 ids have rewards but no problem, such as 'other'"):
        split_by_difficulty(one, {"aime24/0": [1], "other": [1]})
    with pytest.raises(DataError, match="low must be below high"):
        split_by_difficulty(one, {"aime24/0": [1]}, low=1, high=1)


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.[pj]*")), ids=lambda path: path.stem)
def test_written_problems_read_back_equal(tmp_path, path):
    originals = load_source(DataSource(path=str(path), verifier="exact"))
    assert write_problems(originals, tmp_path / "new" / "kept.jsonl") == len(originals)
    again = load_source(DataSource(path=str(tmp_path / "new" / "kept.jsonl")))
    assert again == originals
    assert fingerprint(again) == fingerprint(originals)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["kept.jsonl"]


def test_written_problems_keep_odd_text_and_alternatives(tmp_path):
    turns = tuple(
        {"role": r, "content": f"{r} \u2028 \x85 \u00e9 {{}} \\boxed{{}}\n"}
        for r in ("system", "user")
    )
    odd = [
        Problem(
            "a b/\u00e9", turns, ("1.50", " $x$ "), "module:function", "", {"tests": [{"in": None}]}
        )
    ]
    write_problems(odd, tmp_path / "odd.jsonl")
    assert load_source(DataSource(path=str(tmp_path / "odd.jsonl"))) == odd


def test_writing_no_problem_or_another_format_is_an_error(tmp_path, problems):
    with pytest.raises(DataError, match="no problem to write"):
        write_problems([], tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"end the name with \.jsonl"):
        write_problems(problems, tmp_path / "a.json")


def test_a_damaged_row_of_our_own_schema_is_named(tmp_path, problems):
    write_problems(problems[:2], tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    row = json.loads(lines[1])
    for key, value, complaint in [
        ("answer", "1", "not a list of texts"),
        ("verifier", None, "verifier is null"),
    ]:
        (tmp_path / "a.jsonl").write_text(lines[0] + "\n" + json.dumps({**row, key: value}) + "\n")
        with pytest.raises(
            DataError, match=rf"a\.jsonl, line 2: {complaint}|a\.jsonl, line 2: .*{complaint}"
        ):
            load_source(DataSource(path=str(tmp_path / "a.jsonl")))
