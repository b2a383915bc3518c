"""A run that is stopped, killed or resumed ends where it would have ended anyway, bit for bit."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import TrainingRun, assert_same_run, copied, train_here

pytestmark = pytest.mark.slow

LORA = ("model.lora.rank=4", "optimizer.lr=1e-2")


def test_a_stopped_run_of_adapters_resumes_bit_for_bit(tmp_path: Path) -> None:
    """SIGUSR1 to one rank alone stops all of them, with a checkpoint of the last whole step."""
    uninterrupted = TrainingRun(tmp_path / "whole", *LORA).finish()
    run = TrainingRun(tmp_path / "run", *LORA)
    run.wait_for(lambda: run.reached(3))
    os.kill(run.rank_pids()[-1], signal.SIGUSR1)
    run.finish()
    stopped_at = run.status()["step"]
    assert run.status()["state"] == "stopped"
    assert 3 <= stopped_at < 5
    assert (run.folder / "checkpoints" / f"step_{stopped_at:06d}").is_dir()
    assert not (run.folder / "model").exists()
    again = TrainingRun(tmp_path / "run", *LORA).finish()
    assert again.status() == {"state": "finished", "step": 5}
    assert_same_run(uninterrupted, again)


def test_a_killed_run_resumes_bit_for_bit(undisturbed: TrainingRun, tmp_path: Path) -> None:
    """kill -9 of a rank loses at most the steps since the last checkpoint; the resumed run repeats them alike."""
    run = TrainingRun(tmp_path / "run")
    run.wait_for(lambda: run.reached(3) and (run.folder / "checkpoints" / "step_000002").is_dir())
    os.kill(run.rank_pids()[0], signal.SIGKILL)
    run.finish(status=1)
    again = TrainingRun(tmp_path / "run").finish()
    assert "resumed from step" in again.output()
    assert_same_run(undisturbed, again)


def test_sigterm_to_torchrun_saves_before_the_ranks_leave(tmp_path: Path) -> None:
    run = TrainingRun(tmp_path / "run", "run.steps=500")
    run.wait_for(lambda: run.reached(1))
    run.process.send_signal(signal.SIGTERM)
    run.process.wait(60)
    assert run.status()["state"] == "stopped"
    assert (run.folder / "checkpoints" / f"step_{run.status()['step']:06d}" / ".metadata").is_file()
    assert list((run.folder / "checkpoints").glob("*.partial")) == []


def test_a_half_written_checkpoint_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    """What a run killed while writing leaves behind is removed, and the one before is used."""
    run = train_here(tmp_path / "run", "run.steps=2")
    folder = run.folder / "checkpoints"
    shutil.copytree(folder / "step_000002", folder / "step_000004.partial")
    (folder / "step_000004.partial" / ".metadata").unlink()
    again = train_here(tmp_path / "run", "run.steps=3")
    assert "removing half-written checkpoint" in again.output()
    assert "resumed from step 2" in again.output()
    assert sorted(path.name for path in folder.iterdir()) == ["step_000002", "step_000003"]


def test_a_run_goes_on_with_one_rank_and_then_four_where_two_left_off(tmp_path: Path) -> None:
    """On recorded episodes, since ranks that round differently would soon sample others."""
    record = tmp_path / "record"
    steps = ("run.steps=6", "checkpoint.keep_last=3")
    two = TrainingRun(tmp_path / "two", *steps, f"rollout.record.write={record}").finish()
    folder = copied(two, tmp_path / "run", checkpoints=[2])
    one = train_here(folder, "run.steps=4", f"rollout.record.read={record}")
    assert "resuming on 1 ranks a run of 2" in one.output()
    four = TrainingRun(folder, "run.steps=6", f"rollout.record.read={record}", ranks=4).finish()
    assert "resuming on 4 ranks a run of 1" in four.output()
    for ours, theirs in zip(four.metrics(), two.metrics(), strict=True):
        for name in ("step", "train/loss", "train/tokens", "optim/grad_norm", "optim/lr"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    folders = (Path("configs/demo/model"), two.folder / "model", four.folder / "model")
    start, expected, found = (torch.cat([w.flatten() for _, w in sorted(load_file(each / "model.safetensors").items())])
                              for each in folders)  # fmt: skip
    assert float((found - expected).norm()) < 1e-3 * float((expected - start).norm())


def test_changed_training_data_is_refused_until_it_is_accepted_by_name(
    undisturbed: TrainingRun, tmp_path: Path
) -> None:
    folder = copied(undisturbed, tmp_path / "run", checkpoints=[5])
    changes = (
        "run.steps=6",
        "data.train=[{path: configs/demo/train.jsonl, verifier: arithmetic, limit: 50}]",
    )
    refused = train_here(folder, *changes, status=2)
    assert "the training problems are not those of the checkpoint" in refused.output()
    [key] = set(re.findall(r"data\.accept_fingerprint=\S+", refused.output()))
    train_here(folder, *changes, "data.accept_fingerprint=sha256:0123456789abcdef", status=2)
    accepted = train_here(folder, *changes, key)
    assert accepted.status() == {"state": "finished", "step": 6}
    assert accepted.metrics()[:5] == undisturbed.metrics()
    assert accepted.metrics()[5]["data/epoch"] < 1


def test_a_resume_refuses_what_the_checkpoint_cannot_take_on(tmp_path: Path) -> None:
    """A learning rate or objective comes back from the checkpoint, so a changed one would be ignored."""
    train_here(tmp_path / "run", "run.steps=2")
    recorded = (tmp_path / "run" / "config.yaml").read_text()
    changes = ("optimizer.lr=1e-5", "algorithm.objective=grpo", "run.steps=3")
    again = train_here(tmp_path / "run", *changes, status=2)
    assert "optimizer.lr was 0.001 and is 1e-05" in again.output()
    assert "algorithm.objective was 'spiral' and is 'grpo'" in again.output()
    assert (tmp_path / "run" / "config.yaml").read_text() == recorded


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:  # as a run holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = train_here(tmp_path / "run", "run.steps=1", status=2)
    assert "is in use by another run" in second.output()
    train_here(tmp_path / "run", "run.steps=1")


def test_records_of_an_earlier_start_are_kept_apart(tmp_path: Path) -> None:
    """A start from step 0 must not report the evaluation that another model left in the folder as its own."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "time": 1.0, "eval/search_accuracy": 0.99}\n'
    )
    evaluated = "data.eval=[{path: configs/demo/heldout.jsonl, verifier: arithmetic, limit: 2}]"
    run = train_here(folder, "run.steps=1", evaluated)
    assert run.metrics()[0]["step"] == 0
    assert run.metrics()[0]["eval/search_accuracy"] != 0.99
    assert "0.99" in (folder / "earlier" / "1" / "metrics.jsonl").read_text()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    run = train_here(
        tmp_path / "run", "run.steps=5", "checkpoint.every=1", "checkpoint.keep_last=2"
    )
    names = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert names == ["step_000004", "step_000005"]
