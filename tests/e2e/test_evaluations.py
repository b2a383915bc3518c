"""Evaluations end to end: on more ranks, killed and resumed, of models, runs and checkpoints, by either engine."""

import json
import os
import shutil
import signal
import time

import pyarrow.parquet as pq
import pytest

from tests.e2e.evaluations import DEMO, SMALL, evaluate, results, start
from tests.e2e.runs import TrainingRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An evaluation on one rank, never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "evaluation"
    return folder, evaluate(DEMO, *SMALL, "--output", str(folder))


def measured(folder):
    """Every measure, without what the engine had cached: that is a matter of its batches."""
    found = results(folder)
    for each in found["measures"]:
        del each["tokens"]["cached"]
    return found


def test_an_evaluation_measures_every_harness_and_prints_it(whole):
    folder, printed = whole
    found = results(folder)
    assert len(found["problems"]) == 10
    assert {each["harness"] for each in found["measures"]} == {
        "pass_at_k", "majority", "sequential", "rsa", "short-then-long",
    }  # fmt: skip
    for each in found["measures"]:
        assert len(each["values"]) == 10
        assert each["interval"][0] <= each["mean"] <= each["interval"][1]
        assert each["tokens"]["generated"] <= each["budget"]
    assert "short-then-long" in printed
    analysis = json.loads((folder / "analysis.json").read_text())
    assert {"search6", "search4_4of2_4of2"} <= set(analysis)
    assert analysis["search4_4of2_4of2"]["diversity"][2]["level"] == "aggregation 2"


def test_every_trace_is_kept_with_the_set_that_it_answered(whole):
    (first, *_) = sorted((whole[0] / "traces" / "search4_4of2_4of2").glob("*.parquet"))
    for row in pq.read_table(first).to_pylist():
        assert len(row["sets"]) == 8
        assert all(set(members) <= set(range(4)) for members in row["sets"][:4])
        assert all(set(members) <= set(range(4, 8)) for members in row["sets"][4:])
        assert [trace["set_index"] for trace in row["traces"]] == [None] * 4 + list(range(8))


def test_two_ranks_measure_the_same(whole, tmp_path):
    evaluate(DEMO, *SMALL, "--output", str(tmp_path), ranks=2)
    assert measured(tmp_path) == measured(whole[0])


def test_killed_and_started_again_it_ends_with_the_same_bytes(whole, tmp_path):
    process = start(DEMO, *SMALL, "--output", str(tmp_path))
    deadline = time.monotonic() + 180
    while len(list(tmp_path.glob("records/search6/*.json"))) < 2:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("chunk_*.json")}
    assert not (tmp_path / "results.json").exists()
    evaluate(DEMO, *SMALL, "--output", str(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in done} == done, (
        "what was done is not done again"
    )
    kept = [path.relative_to(whole[0]) for path in sorted(whole[0].rglob("*")) if path.is_file()]
    kept = [
        path
        for path in kept
        if path.parts[0] in ("records", "traces") or path.name in ("results.json", "analysis.json")
    ]
    assert len(kept) > 20
    for path in kept:
        assert (tmp_path / path).read_bytes() == (whole[0] / path).read_bytes(), path


def test_a_folder_of_another_evaluation_is_refused_and_new_harnesses_reuse_what_is_there(
    whole, tmp_path
):
    folder = tmp_path / "copy"
    shutil.copytree(whole[0], folder)
    printed = evaluate(
        DEMO, *SMALL, "rollout.sampling.temperature=0.5", "--output", str(folder), status=2
    )
    assert "rollout.sampling.temperature was 1.0 and is 0.5" in printed
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("chunk_*.json")}
    evaluate(
        DEMO, *SMALL, "eval.harnesses=[{kind: best_of_n, samples: 6}]", "--output", str(folder)
    )
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("chunk_*.json")} == before
    assert {each["metric"] for each in results(folder)["measures"]} == {"best"}


def test_a_run_its_checkpoint_and_its_exported_model_are_one_model(tmp_path):
    run = (
        TrainingRun(
            tmp_path / "run", "checkpoint.every=5", "model.lora.rank=4", "optimizer.lr=0.03"
        )
        .finish()
        .folder
    )
    small = [
        *SMALL,
        "data.eval=[{path: configs/demo/heldout.jsonl, verifier: arithmetic, limit: 10}]",
    ]
    small.remove("data.eval.0.limit=10")
    short = [*small, "eval.harnesses=[{kind: pass_at_k, samples: 6}]"]
    evaluate(*short, "--model", str(run))
    evaluate(*short, "--model", str(run / "checkpoints" / "step_000005"), ranks=2)
    evaluate(DEMO, *short, "--model", str(run / "model"), "--output", str(tmp_path / "hf"))
    evaluate(DEMO, *short, "--output", str(tmp_path / "start"))
    expected = measured(run / "evaluation")
    assert measured(run / "evaluation" / "step_000005") == expected
    assert measured(tmp_path / "hf") == expected
    assert measured(tmp_path / "start") != expected


@pytest.mark.vllm
def test_vllm_measures_what_the_embedded_engine_does_on_average(whole, tmp_path):
    """Other random numbers, the same model: pass@1 of 10 problems by 64 samples each, within 4 standard errors."""
    many = [*SMALL, "eval.harnesses=[{kind: pass_at_k, samples: 64, ks: [1]}]"]
    evaluate(DEMO, *many, "--output", str(tmp_path / "embedded"))
    vllm = [*many, "rollout.engine.name=vllm", "rollout.engine.kv_cache_mb=64"]
    evaluate(DEMO, *vllm, "--output", str(tmp_path / "vllm"), launched=True)
    (ours,), (theirs,) = (
        results(tmp_path / "embedded")["measures"],
        results(tmp_path / "vllm")["measures"],
    )
    variance = (
        sum(p * (1 - p) / 64 for values in (ours["values"], theirs["values"]) for p in values)
        / 10**2
    )
    assert abs(ours["mean"] - theirs["mean"]) < 4 * variance**0.5
    first = {path: path.read_bytes() for path in (tmp_path / "vllm" / "records").rglob("*.json")}
    shutil.rmtree(tmp_path / "vllm" / "records")
    evaluate(DEMO, *vllm, "--output", str(tmp_path / "vllm"), launched=True)
    assert {path: path.read_bytes() for path in first} == first


def test_a_model_needs_no_configuration_file(tmp_path):
    printed = evaluate(
        "data.eval=[{path: configs/demo/heldout.jsonl, verifier: arithmetic, limit: 3}]",
        "data.max_prompt_tokens=8", "rollout.sampling.max_response_tokens=8", "rollout.sampling.max_context_tokens=64",
        "prompts.instruction=", "eval.harnesses=[{kind: pass_at_k, samples: 2}]",
        "--model", "configs/demo/model", "--output", str(tmp_path),
    )  # fmt: skip
    assert "3 problems" in printed
