"""A run that is stopped, killed or resumed ends where it would have ended anyway, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from spiral_mega.telemetry.trace_writer import read_traces
from tests.e2e.runs import TrainingRun

pytestmark = pytest.mark.slow

LORA = ("model.lora.rank=4", "optimizer.lr=1e-2")


@pytest.fixture(scope="module", params=["full", "lora"])
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A run that nothing disturbed; `overrides` tells how it was trained."""
    overrides = LORA if request.param == "lora" else ()
    run = TrainingRun(tmp_path_factory.mktemp(request.param) / "whole", *overrides).finish()
    run.overrides = overrides  # type: ignore[attr-defined]
    return run


def assert_same_run(left: TrainingRun, right: TrainingRun) -> None:
    assert left.metrics() == right.metrics()
    assert [record["step"] for record in left.metrics()] == [1, 2, 3, 4, 5]
    assert all_traces(left) == all_traces(right)
    ours, theirs = (load_file(run.folder / "model" / "model.safetensors") for run in (left, right))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def all_traces(run: TrainingRun) -> dict[str, list[dict[str, Any]]]:
    return {path.name: read_traces(path) for path in sorted((run.folder / "traces").glob("*.parquet"))}


def status(run: TrainingRun) -> dict[str, Any]:
    return json.loads((run.folder / "status.json").read_text())


def test_a_stopped_run_resumes_bit_for_bit(uninterrupted: TrainingRun, tmp_path: Path) -> None:
    """SIGUSR1 to one rank alone stops all of them, with a checkpoint of the last whole step."""
    run = TrainingRun(tmp_path / "run", *uninterrupted.overrides)  # type: ignore[attr-defined]
    run.wait_for(lambda: run.reached(3))
    os.kill(run.rank_pids()[-1], signal.SIGUSR1)
    run.finish()
    stopped_at = status(run)["step"]
    assert status(run)["state"] == "stopped"
    assert 3 <= stopped_at < 5
    assert (run.folder / "checkpoints" / f"step_{stopped_at:06d}").is_dir()
    assert not (run.folder / "model").exists()
    again = TrainingRun(tmp_path / "run", *uninterrupted.overrides).finish()  # type: ignore[attr-defined]
    assert status(again) == {"state": "finished", "step": 5}
    assert_same_run(uninterrupted, again)


def test_a_killed_run_resumes_bit_for_bit(uninterrupted: TrainingRun, tmp_path: Path) -> None:
    """kill -9 of a rank loses at most the steps since the last checkpoint; they are done again alike."""
    run = TrainingRun(tmp_path / "run", *uninterrupted.overrides)  # type: ignore[attr-defined]
    run.wait_for(lambda: run.reached(3) and (run.folder / "checkpoints" / "step_000002").is_dir())
    os.kill(run.rank_pids()[0], signal.SIGKILL)
    run.finish(status=1)
    again = TrainingRun(tmp_path / "run", *uninterrupted.overrides).finish()  # type: ignore[attr-defined]
    assert "resumed from step" in again.output()
    assert_same_run(uninterrupted, again)


def test_sigterm_to_torchrun_saves_before_the_ranks_leave(tmp_path: Path) -> None:
    run = TrainingRun(tmp_path / "run", "run.steps=500")
    run.wait_for(lambda: run.reached(1))
    run.process.send_signal(signal.SIGTERM)
    run.process.wait(60)
    assert status(run)["state"] == "stopped"
    assert (run.folder / "checkpoints" / f"step_{status(run)['step']:06d}" / ".metadata").is_file()
    assert list((run.folder / "checkpoints").glob("*.partial")) == []


def test_a_half_written_checkpoint_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    """What a run killed while writing leaves behind is removed, and the one before is used."""
    run = TrainingRun(tmp_path / "run", "run.steps=2").finish()
    folder = run.folder / "checkpoints"
    shutil.copytree(folder / "step_000002", folder / "step_000004.partial")
    (folder / "step_000004.partial" / ".metadata").unlink()
    again = TrainingRun(tmp_path / "run", "run.steps=3").finish()
    assert "removing half-written checkpoint" in again.output()
    assert "resumed from step 2" in again.output()
    assert sorted(path.name for path in folder.iterdir()) == ["step_000002", "step_000003"]


@pytest.mark.parametrize("damage", ["truncated", "no meta"])
def test_a_damaged_checkpoint_is_a_plain_error_that_names_it(tmp_path: Path, damage: str) -> None:
    run = TrainingRun(tmp_path / "run", "run.steps=2", ranks=1).finish()
    newest = run.folder / "checkpoints" / "step_000002"
    if damage == "truncated":
        shard = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
        os.truncate(shard, shard.stat().st_size // 2)
    else:
        (newest / "meta.json").write_text("{")
    again = TrainingRun(tmp_path / "run", "run.steps=3", ranks=1).finish(status=1)
    ours, error, _ = again.output().rpartition("\nerror: ")
    assert error
    assert str(newest) in again.output()[len(ours) :].splitlines()[1]
    assert "Traceback" not in ours  # torchrun's own comes after


def test_a_checkpoint_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Nothing is lost; the data goes on where it was."""
    run = TrainingRun(tmp_path / "run", "run.steps=2").finish()
    again = TrainingRun(tmp_path / "run", "run.steps=4", ranks=1).finish()
    assert "resuming on 1 ranks a run of 2" in again.output()
    epochs = [record["data/epoch"] for record in run.metrics()]
    assert epochs == sorted(set(epochs))
    assert len(epochs) == 4


def test_changed_training_data_is_refused_on_resume(tmp_path: Path) -> None:
    TrainingRun(tmp_path / "run", "run.steps=2", ranks=1).finish()
    fewer = "data.train=[{path: configs/demo/train.jsonl, kind: arithmetic, limit: 50}]"
    again = TrainingRun(tmp_path / "run", "run.steps=3", fewer, ranks=1).finish(status=1)
    assert "the training problems are not those of the checkpoint" in again.output()


def test_a_resume_refuses_what_the_checkpoint_cannot_take_on(tmp_path: Path) -> None:
    """A learning rate or objective comes back from the checkpoint, so a changed one would be ignored."""
    TrainingRun(tmp_path / "run", "run.steps=2", ranks=1).finish()
    recorded = (tmp_path / "run" / "config.yaml").read_text()
    changes = ("optimizer.lr=1e-5", "algorithm.objective=grpo", "run.steps=3")
    again = TrainingRun(tmp_path / "run", *changes, ranks=1).finish(status=1)
    assert "optimizer.lr was 0.001 and is 1e-05" in again.output()
    assert "algorithm.objective was 'spiral' and is 'grpo'" in again.output()
    assert (tmp_path / "run" / "config.yaml").read_text() == recorded


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    first = TrainingRun(tmp_path / "run", "run.steps=40", "checkpoint.every=1", ranks=1)
    first.wait_for(lambda: first.reached(1))
    second = TrainingRun(tmp_path / "run", "run.steps=40", ranks=2).finish(status=1)
    assert "is in use by another run" in second.output()
    assert first.process.poll() is None
    first.process.send_signal(signal.SIGTERM)
    first.process.wait(60)
    assert status(first)["state"] == "stopped"


def test_records_of_an_earlier_start_are_kept_apart(tmp_path: Path) -> None:
    """A start from step 0 must not report the evaluation that another model left in the folder as its own."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0, "time": 1.0, "eval/search_accuracy": 0.99}\n')
    evaluated = "data.eval=[{path: configs/demo/heldout.jsonl, kind: arithmetic, limit: 2}]"
    run = TrainingRun(folder, "run.steps=1", evaluated, ranks=1).finish()
    assert run.metrics()[0]["step"] == 0
    assert run.metrics()[0]["eval/search_accuracy"] != 0.99
    assert "0.99" in (folder / "earlier" / "1" / "metrics.jsonl").read_text()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    run = TrainingRun(tmp_path / "run", "run.steps=5", "checkpoint.every=1", "checkpoint.keep_last=2", ranks=1).finish()
    names = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert names == ["step_000004", "step_000005"]
