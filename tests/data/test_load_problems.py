"""Real data of every schema is read unchanged, and bad data is named by file and row."""

import datetime
import json
import logging
from pathlib import Path

import pandas
import pyarrow as pa
import pytest
from pyarrow import parquet

from spiral_mega.config.schema import DataSource
from spiral_mega.data.problems import fingerprint, load_source, load_sources
from spiral_mega.errors import DataError

SAMPLES = Path(__file__).parent / "samples"


def source(path: Path | str, **keys) -> DataSource:
    return DataSource(path=str(path), **keys)


def write(path: Path, *rows: object) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


@pytest.fixture(autouse=True)
def _private_dataset_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


# Real data


def test_gsm8k_answers_lose_their_solution_and_their_thousands_separators():
    problems = load_source(source(SAMPLES / "gsm8k.jsonl"))
    finals = [
        "18",
        "3",
        "70000",
        "540",
        "20",
        "64",
        "260",
        "160",
        "2125",
        "114200",
        "1600",
        "1450000",
    ]
    assert [problem.answer for problem in problems] == [(final,) for final in finals]
    assert problems[1].messages == (
        {
            "role": "user",
            "content": "A robe takes 2 bolts of blue fiber and half that much white fiber.  "
            "How many bolts in total does it take?",
        },
    )
    assert problems[1].extra["answer"].startswith("It takes 2/2=<<2/2=1>>1 bolt"), (
        "the worked answer is kept"
    )


@pytest.mark.parametrize("name", ["aime24", "aime25", "amc23", "minerva", "olympiad", "hmmt25"])
def test_parquet_ground_truths_and_prompts_equal_those_that_pandas_reads(name):
    problems = load_source(source(SAMPLES / f"{name}.parquet"))
    frame = pandas.read_parquet(SAMPLES / f"{name}.parquet")
    assert len(problems) == len(frame)
    for problem, prompt, reward_model in zip(
        problems, frame["prompt"], frame["reward_model"], strict=True
    ):
        assert problem.messages[-1]["content"] == prompt[0]["content"]
        truth = reward_model["ground_truth"]
        if isinstance(truth, str):
            expected = [truth]
        elif isinstance(truth, float):
            expected = [f"{truth:.0f}"]
        else:
            expected = list(dict.fromkeys(text.strip() for text in truth))
        assert list(problem.answer) == expected


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("aime24", 1, ("025",)),
        ("aime25", 4, ("336^\\circ",)),
        ("amc23", 0, ("142",)),
        ("amc23", 8, ("-4",)),
        ("minerva", 0, ("9.6",)),
        ("minerva", 5, ("6630.65", "6630")),
        ("minerva", 7, ("7.5 \\times 10^7",)),
        ("olympiad", 3, ("$69$,$84$",)),
        ("hmmt25", 2, ("\\frac{1}{576}",)),
    ],
)
def test_ground_truths_of_every_format_are_read_correctly(name, row, answer):
    assert load_source(source(SAMPLES / f"{name}.parquet"))[row].answer == answer


def test_verl_columns_are_all_kept():
    problem = load_source(source(SAMPLES / "hmmt25.parquet"))[0]
    assert problem.source == "MathArena/hmmt_feb_2025"
    assert problem.extra["problem_type"] == ["Number Theory"]
    assert problem.extra["extra_info"] == {"index": 0, "split": "train"}
    assert problem.extra["reward_model"]["style"] == "rule"
    assert load_source(source(SAMPLES / "amc23.parquet"))[0].source == "amc23", (
        "an empty data_source is no source"
    )


def test_gsm8k_in_parquet_reads_as_in_jsonl(tmp_path):
    rows = [json.loads(line) for line in (SAMPLES / "gsm8k.jsonl").read_text().splitlines()]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "gsm8k.parquet")
    assert load_source(source(tmp_path / "gsm8k.parquet")) == load_source(
        source(SAMPLES / "gsm8k.jsonl")
    )


# Plain rows


@pytest.mark.parametrize("column", ["problem", "question", "prompt"])
def test_plain_rows_hold_the_problem_under_any_of_the_usual_names(tmp_path, column):
    (problem,) = load_source(
        source(write(tmp_path / "mine.jsonl", {column: "1+1?", "answer": 2}), verifier="exact")
    )
    assert (problem.messages, problem.answer) == (({"role": "user", "content": "1+1?"},), ("2",))
    assert (problem.id, problem.verifier, problem.source) == ("mine/0", "exact", "mine")


def test_messages_keep_their_turns(tmp_path):
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    (problem,) = load_source(
        source(write(tmp_path / "mine.jsonl", {"prompt": turns, "answer": ["a", "b"]}))
    )
    assert problem.messages == tuple(turns)
    assert problem.answer == ("a", "b")


def test_values_that_json_cannot_hold_are_kept_as_text(tmp_path):
    row = {"problem": "p", "answer": "1", "day": datetime.date(2025, 2, 1)}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert load_source(source(tmp_path / "a.parquet"))[0].extra == {"day": "2025-02-01"}


# Ids, limits, fingerprints


def test_ids_are_the_rows_own_or_derived_from_name_and_row(tmp_path):
    path = write(
        tmp_path / "mix.jsonl",
        {"id": 7, "problem": "a", "answer": "1"},
        {"problem": "b", "answer": "1"},
    )
    assert [problem.id for problem in load_source(source(path))] == ["7", "mix/1"]


def test_a_repeated_id_is_an_error_that_names_both_rows(tmp_path):
    path = write(tmp_path / "twice.jsonl", *[{"id": "x", "problem": "a", "answer": "1"}] * 2)
    with pytest.raises(DataError, match=r"twice\.jsonl, line 2: id 'x' is also that of .*line 1"):
        load_source(source(path))


def test_sources_that_share_an_id_are_an_error(tmp_path):
    (tmp_path / "a").mkdir()
    row = {"problem": "a", "answer": "1"}
    first, second = write(tmp_path / "m.jsonl", row), write(tmp_path / "a" / "m.jsonl", row)
    with pytest.raises(DataError, match=r"id 'm/0' is also in .*m\.jsonl"):
        load_sources([source(first), source(second)])
    joined = load_sources([source(first), source(SAMPLES / "aime24.parquet", limit=2)])
    assert [problem.id for problem in joined] == ["m/0", "aime24/0", "aime24/1"]


def test_limit_takes_the_first_and_counts_the_rest(caplog):
    caplog.set_level(logging.INFO)
    everything = load_source(source(SAMPLES / "aime24.parquet"))
    assert load_source(source(SAMPLES / "aime24.parquet", limit=4)) == everything[:4]
    assert "4 problems in the verl schema, 26 rows left out by limit" in caplog.text


def test_the_fingerprint_changes_with_any_problem_and_with_the_order():
    problems = load_source(source(SAMPLES / "aime24.parquet"))
    again = load_source(source(SAMPLES / "aime24.parquet"))
    assert fingerprint(problems) == fingerprint(again)
    assert len({fingerprint(p) for p in (problems, problems[::-1], problems[:-1], [])}) == 4
    other_kind = load_source(source(SAMPLES / "aime24.parquet", verifier="exact"))
    assert fingerprint(problems) != fingerprint(other_kind)


# Bad rows are named

GOOD = {"problem": "p", "answer": "1"}
WORKED = {"question": "q", "answer": "so\n#### 1"}
VERL = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "1"}}


@pytest.mark.parametrize(
    ("good", "bad", "complaint"),
    [
        (GOOD, '{"problem": ', "not JSON"),
        (GOOD, "[1]", "holds a list"),
        (GOOD, {"answer": "1"}, "hold 0 of"),
        (GOOD, {"problem": "p", "question": "q", "answer": "1"}, "hold 2 of"),
        (GOOD, {"problem": "p"}, "column 'answer' is missing"),
        (GOOD, {"problem": "p", "answer": None}, "answer is null"),
        (GOOD, {"problem": "p", "answer": " "}, "answer: .*empty"),
        (GOOD, {"problem": "p", "answer": []}, "answer: .*empty"),
        (GOOD, {"problem": "p", "answer": ["1", None]}, "answer: .*NoneType"),
        (GOOD, '{"problem": "p", "answer": NaN}', "answer: .*not finite"),
        (GOOD, {"problem": " \n", "answer": "1"}, "problem is empty"),
        (GOOD, {"problem": 3, "answer": "1"}, "problem is 3, neither text"),
        (GOOD, '{"problem": "half \\ud800", "answer": "1"}', "problem is not UTF-8 text"),
        (GOOD, {"problem": [{"role": "robot", "content": "q"}], "answer": "1"}, r"problem\[0\] is"),
        (
            GOOD,
            {"problem": [{"role": "user", "content": ""}], "answer": "1"},
            r"problem\[0\]\.content is empty",
        ),
        (
            GOOD,
            {"problem": [{"role": "user", "content": "q", "name": "n"}], "answer": "1"},
            r"keys \['name'\]",
        ),
        (
            GOOD,
            {"problem": [{"role": "assistant", "content": "q"}], "answer": "1"},
            "ends with a 'assistant' message",
        ),
        (GOOD, {"id": "", "problem": "p", "answer": "1"}, "id is empty"),
        (WORKED, {"question": "q", "answer": "so 1"}, "answer has no ####"),
        (WORKED, {"question": "q", "answer": "so ####"}, "answer: .*empty"),
        (WORKED, {"question": "", "answer": "#### 1"}, "question is empty"),
        (VERL, {"prompt": VERL["prompt"], "reward_model": {}}, "without a ground_truth"),
        (
            VERL,
            {"prompt": VERL["prompt"], "reward_model": {"ground_truth": None}},
            "reward_model.ground_truth: ",
        ),
        (
            VERL,
            {"prompt": [], "reward_model": {"ground_truth": "1"}},
            "neither text nor a list of messages",
        ),
        (VERL, {"prompt": VERL["prompt"]}, "column 'reward_model' is missing"),
    ],
)
def test_a_bad_row_is_an_error_that_names_file_and_line(tmp_path, good, bad, complaint):
    path = write(tmp_path / "bad.jsonl", good, bad)
    with pytest.raises(DataError, match=rf"bad\.jsonl, line 2: .*{complaint}"):
        load_source(source(path))


def test_broken_utf8_in_jsonl_names_the_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n\n{"problem": "caf\xe9", "answer": "1"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl, line 3: not UTF-8"):
        load_source(source(path))


def test_broken_utf8_in_parquet_names_the_row(tmp_path):
    texts = pa.array([b"fine", b"caf\xe9"]).cast(pa.binary()).view(pa.string())
    parquet.write_table(
        pa.table({"problem": texts, "answer": ["1", "2"]}), tmp_path / "bad.parquet"
    )
    with pytest.raises(DataError, match=r"bad\.parquet, row 1: not UTF-8"):
        load_source(source(tmp_path / "bad.parquet"))


def test_a_null_in_parquet_names_the_row(tmp_path):
    parquet.write_table(
        pa.Table.from_pylist([GOOD, {"problem": "p", "answer": None}]), tmp_path / "bad.parquet"
    )
    with pytest.raises(DataError, match=r"bad\.parquet, row 1: answer is null"):
        load_source(source(tmp_path / "bad.parquet"))


# Unreadable sources


def test_unknown_columns_are_listed_with_those_that_are_known(tmp_path):
    path = write(tmp_path / "a.jsonl", {"Problem": "p", "solution": "1"})
    with pytest.raises(
        DataError, match=r"columns \['Problem', 'solution'\] fit no known schema: rename"
    ):
        load_source(source(path))


def test_unreadable_files_are_errors_with_a_remedy(tmp_path):
    with pytest.raises(DataError, match="no such file: correct the path"):
        load_source(source(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="holds no rows"):
        load_source(source(write(tmp_path / "empty.jsonl")))
    with pytest.raises(DataError, match=r"read as \.jsonl or \.parquet"):
        load_source(source(write(tmp_path / "a.csv", "x")))
    with pytest.raises(DataError, match="not a readable Parquet file"):
        load_source(source(write(tmp_path / "a.parquet", "x")))
    with pytest.raises(DataError, match="a file has no subsets"):
        load_source(source(SAMPLES / "gsm8k.jsonl", subset="main"))


# Hugging Face datasets


def test_a_folder_that_load_dataset_reads_gives_the_same_problems_as_its_file(tmp_path):
    folder = tmp_path / "amc"
    folder.mkdir()
    (folder / "test.parquet").write_bytes((SAMPLES / "amc23.parquet").read_bytes())
    problems = load_source(source(folder, split="test"))
    direct = load_source(source(SAMPLES / "amc23.parquet"))
    assert [(p.messages, p.answer) for p in problems] == [(p.messages, p.answer) for p in direct]
    assert (problems[3].id, problems[3].source) == ("amc/test/3", "amc/test")


@pytest.mark.parametrize("with_splits", [True, False])
def test_a_dataset_saved_to_disk_is_read(tmp_path, with_splits):
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list(
        [json.loads(line) for line in (SAMPLES / "gsm8k.jsonl").read_text().splitlines()]
    )
    folder = tmp_path / "saved"
    (DatasetDict({"train": data}) if with_splits else data).save_to_disk(folder)
    problems = load_source(source(folder, limit=9))
    assert [p.answer for p in problems] == [
        p.answer for p in load_source(source(SAMPLES / "gsm8k.jsonl"))[:9]
    ]


def test_a_missing_dataset_is_an_error_with_a_remedy(tmp_path):
    from datasets import Dataset, DatasetDict

    with pytest.raises(DataError, match="without network access, download the dataset first"):
        load_source(source("./no/such/folder"))
    DatasetDict({"train": Dataset.from_list([GOOD])}).save_to_disk(tmp_path / "saved")
    with pytest.raises(
        DataError, match=r"split 'test' cannot be loaded \(its splits are \['train'\]\)"
    ):
        load_source(source(tmp_path / "saved", split="test"))
    with pytest.raises(DataError, match="a dataset saved to disk has none"):
        load_source(source(tmp_path / "saved", subset="main"))


@pytest.mark.parametrize("column", ["question", "problem", "prompt"])
def test_a_worked_answer_gives_its_final_number_under_any_name_of_the_question(tmp_path, column):
    path = tmp_path / "worked.jsonl"
    path.write_text(json.dumps({column: "How many eggs?", "answer": "9*2 = 18\n#### 1,018"}) + "\n")
    assert [problem.answer for problem in load_source(DataSource(path=str(path)))] == [("1018",)]
