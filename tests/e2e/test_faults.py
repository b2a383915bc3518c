"""What goes wrong on a cluster: what the user is told, and that the same command then loses nothing but the steps since
the last checkpoint. docs/guide/faults.md lists every fault and its test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.runs import TrainingRun, copied, train_here

pytestmark = pytest.mark.slow

SOME_TRACES = (
    *(
        "algorithm.search_traces=4",
        "algorithm.set_size=2",
        "algorithm.num_sets=1",
        "algorithm.aggregation_traces=2",
    ),
    *("batch.problems=2", "batch.dynamic_sampling=false"),
)


def kind(name: str) -> str:
    """Training data that is verified by tests.e2e.verifiers."""
    return (
        f"data.train=[{{path: configs/demo/train.jsonl, verifier: 'tests.e2e.verifiers:{name}'}}]"
    )


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of `size` bytes at `folder`. Needs the right to mount; without it the test fails."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def ends(pids: list[int], timeout: float = 60) -> bool:
    """Whether all these processes end in time."""
    deadline = time.monotonic() + timeout
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_hung_rank_is_named_and_all_ranks_leave_their_stacks(tmp_path: Path) -> None:
    switch = tmp_path / "hang"
    run = TrainingRun(
        tmp_path / "run",
        "run.hang_minutes=0.25",
        module="tests.e2e.hanging_trainer",
        FAULT_SWITCH=str(switch),
    )
    run.wait_for(lambda: run.reached(2))
    switch.touch()
    run.finish(status=1)
    hung, waiting = re.search(r"the run hangs: .*\n(.*)\n(.*)", run.output()).groups()  # type: ignore[union-attr]
    assert re.search(r"rank 1, .*does not wait for other ranks: .*waits_forever", hung)
    assert re.search(r"rank 0, .*waits for other ranks", waiting)
    stacks = [(run.folder / "logs" / f"rank{rank}.stacks").read_text() for rank in (0, 1)]
    assert "waits_forever" in stacks[1]
    assert "all_gather_object" in stacks[0]  # where it waits for rank 1
    assert "in train_step" in stacks[0]


def test_ranks_save_and_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """kill -9 of torchrun leaves nobody to end them: they would train on unseen, and keep devices and folder."""
    run = TrainingRun(tmp_path / "run")
    run.wait_for(lambda: run.reached(2))
    ranks = run.rank_pids()
    os.kill(run.process.pid, signal.SIGKILL)
    assert ends(ranks)
    assert run.status()["state"] == "stopped"
    assert run.status()["step"] >= 2
    assert run.checkpoints()[-1] == f"step_{run.status()['step']:06d}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_in_the_middle_of_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    """After SIGTERM the checkpoint is finished. SIGKILL leaves half of it, which the next start removes."""
    run = TrainingRun(tmp_path / "run")
    partial = run.folder / "checkpoints" / "step_000002.partial"
    run.wait_for(lambda: run.reached(1))
    held = run.rank_pids()[-1]
    while not partial.exists():
        assert run.process.poll() is None
    os.kill(held, signal.SIGSTOP)  # the others wait for its part of the checkpoint
    time.sleep(1)
    assert partial.exists(), "the checkpoint was whole before the rank was held: nothing was tested"
    os.kill(run.process.pid if number == signal.SIGTERM else held, number)
    if number == signal.SIGTERM:
        time.sleep(1)
        os.kill(held, signal.SIGCONT)
    run.process.wait(120)
    again = train_here(tmp_path / "run", "run.steps=4")
    if number == signal.SIGTERM:
        assert not partial.exists()
        assert "resumed from step 2" in again.output() or "resumed from step 3" in again.output()
    else:
        assert "removing half-written checkpoint" in again.output()
        assert "resumed from" not in again.output()  # there was none before it


@pytest.mark.root
def test_a_full_disk_ends_the_run_and_spares_the_older_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", "24k") as disk:
        run = TrainingRun(disk, ranks=1).finish(status=1)
        assert "error: no space is left to write to" in run.output()
        subprocess.run(["mount", "-o", "remount,size=9m", disk], check=True)
        run = TrainingRun(disk).finish(status=1)
        assert "could not be written" in run.output()
        assert "No space left on device" in run.output()
        assert "older checkpoints are intact" in run.output()
        subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
        again = TrainingRun(disk).finish()
        assert "resumed from step 2" in again.output()
        assert again.status() == {"state": "finished", "step": 5}


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(
    undisturbed: TrainingRun, tmp_path: Path
) -> None:
    folder = copied(undisturbed, tmp_path / "run", checkpoints=[4, 5])
    newest = folder / "checkpoints" / "step_000005"
    shard = newest / "__1_0.distcp"
    os.truncate(shard, shard.stat().st_size // 2)
    again = train_here(folder)
    assert f"{newest} is damaged (__1_0.distcp has" in again.output()
    assert "resumed from step 4" in again.output()
    assert again.checkpoints() == ["step_000004", "step_000005", "step_000005.damaged"]
    assert again.metrics()[:4] == undisturbed.metrics()[:4]


def test_a_run_whose_every_checkpoint_is_damaged_does_not_start_anew(
    undisturbed: TrainingRun, tmp_path: Path
) -> None:
    folder = copied(undisturbed, tmp_path / "run", checkpoints=[5])
    (folder / "checkpoints" / "step_000005" / "meta.json").write_text("{}")
    again = train_here(folder, "run.steps=6", status=2)
    [message] = set(re.findall(r"^error: .*", again.output(), re.MULTILINE))
    assert "step_000005: meta.json has 2 bytes" in message
    assert "restore one from a copy" in message
    assert again.status()["state"] == "failed"
    assert message.endswith(again.status()["error"])
    assert again.checkpoints() == ["step_000005"]


def test_updates_without_a_finite_gradient_are_skipped_counted_and_bounded(tmp_path: Path) -> None:
    switch = tmp_path / "overflow"
    run = TrainingRun(
        tmp_path / "run",
        "run.steps=1000",
        "policy.max_skipped_updates=8",
        kind("overflows"),
        ranks=1,
        FAULT_SWITCH=str(switch),
    )

    def skipped() -> list[float]:
        return (
            [record.get("optim/skipped", 0.0) for record in run.metrics()] if run.reached(1) else []
        )

    run.wait_for(lambda: run.reached(3))
    switch.touch()
    run.wait_for(lambda: 1.0 in skipped())
    switch.unlink()
    run.wait_for(lambda: skipped()[-1] == 0.0)  # it trains on
    switch.touch()
    run.finish(status=1)
    assert "the gradient was not finite in the last 9 updates" in run.output()
    assert skipped()[-9:].count(1.0) == 9
    switch.unlink()
    last = len(skipped())
    again = train_here(run.folder, f"run.steps={last}", kind("overflows"), FAULT_SWITCH=str(switch))
    assert again.metrics()[-1]["step"] == last
    assert again.metrics()[-1]["optim/skipped"] == 0.0


def test_a_dead_verifier_ends_the_run_before_it_trains_on_zeros(tmp_path: Path) -> None:
    switch = tmp_path / "dead"
    switch.touch()
    overrides = ("run.steps=2", kind("dies"), *SOME_TRACES)
    run = train_here(tmp_path / "run", *overrides, status=2, FAULT_SWITCH=str(switch))
    assert (
        "12 of the step's 12 verifications failed (crash 12), more than rewards.max_failure_rate (0.5)"
        in run.output()
    )
    assert "verification of a response to" in (run.folder / "logs" / "rank0.log").read_text()
    assert not run.reached(1)
    switch.unlink()
    again = train_here(tmp_path / "run", *overrides, FAULT_SWITCH=str(switch))
    assert again.status() == {"state": "finished", "step": 2}
