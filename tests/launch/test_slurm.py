"""Runs on a real Slurm survive a time limit, a bad node and a dead node, and end with the same weights."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.runs import TrainingRun
from tests.launch.cluster import NODES, ROOT, Cluster, kill, pids_on

pytestmark = [pytest.mark.slow, pytest.mark.slurm]

# While FAULT_SWITCH exists the verifier sleeps, so that a step takes seconds and no processor.
DATA = "data.train.0.verifier=tests.e2e.verifiers:slow"
OVERRIDES = (
    "run.steps=40",
    "batch.problems=4",
    "checkpoint.every=2",
    "data.eval=[]",
    "rewards.workers=1",
    DATA,
)


class Job:
    """A run that `spiral-mega launch` gave to Slurm."""

    def __init__(
        self, cluster: Cluster, folder: Path, *options: str, overrides: tuple[str, ...] = OVERRIDES
    ) -> None:
        self.cluster, self.folder, self.switch = cluster, folder, folder.with_suffix(".slow")
        self.switch.touch()
        environment = cluster.environment | {
            "FAULT_SWITCH": str(self.switch),
            "OMP_NUM_THREADS": "1",
        }
        command = [
            *(
                sys.executable,
                "-m",
                "spiral_mega",
                "launch",
                "configs/demo.yaml",
                "--nodes=2",
                "--gpus-per-node=0",
            ),
            *(
                "--ranks-per-node=1",
                "--stop-seconds=50",
                "--health=--min-speed=0 --min-disk-gib=1",
                *options,
            ),
            *(f"run.dir={folder}", *overrides),
        ]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.number = re.match(r"job (\d+):", done.stdout)[1]  # type: ignore[index]

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("launch/*.out")))

    def has_checkpoint(self, step: int) -> bool:
        return any(
            int(path.name[5:]) >= step for path in (self.folder / "checkpoints").glob("step_??????")
        )

    def wait_for_end(self, number: str, state: str = "COMPLETED", timeout: float = 400) -> None:
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.cluster.wait_for(
            lambda: self.cluster.job(number, "JobState") in ended, timeout, self.output
        )
        assert self.cluster.job(number, "JobState") == state, self.output()

    def weights_equal(self, reference: TrainingRun) -> bool:
        ours, theirs = (
            load_file(folder / "model" / "model.safetensors")
            for folder in (self.folder, reference.folder)
        )
        return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def limited(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run whose job ends after three minutes. Submitted first, since most of them are spent in its slow verifier."""
    folder = tmp_path_factory.mktemp("limited") / "run"
    return Job(cluster, folder, "--partition=left", "--time=3:00", "--sbatch=--signal=B:USR1@60")


@pytest.fixture(scope="module")
def array(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The number of an array of an evaluation, of sorts, and a slow training run; and its folder."""
    folder = tmp_path_factory.mktemp("array")
    train = ("batch.problems=4", "data.eval=[]", "checkpoint.every=1", DATA)
    lines = [
        ("config", "configs/demo.yaml", f"run.dir={folder}/shown"),
        (
            "train",
            "configs/demo.yaml",
            f"run.dir={folder}/run",
            "run.steps=8",
            "rewards.workers=1",
            *train,
        ),
    ]
    (folder / "tasks.txt").write_text("".join(" ".join(line) + "\n" for line in lines))
    (folder / "run.slow").touch()
    environment = cluster.environment | {
        "PYTHON": sys.executable, "HEALTH": "off", "RANKS_PER_NODE": "1", "FAULT_SWITCH": str(folder / "run.slow")
    }  # fmt: skip
    # This Slurm has no GPUs to ask for, and other runs on the same nodes.
    script = re.sub(
        "#SBATCH --(gpus-per-node|exclusive).*\n",
        "",
        (ROOT / "launch/slurm/array.sbatch").read_text(),
    )
    (folder / "array.sbatch").write_text(script)
    options = ["--parsable", "--array=1-2", "--partition=left", f"--output={folder}/%a.out"]
    command = ["sbatch", *options, folder / "array.sbatch", folder / "tasks.txt"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), folder


@pytest.fixture(scope="module")
def reference(limited: Job, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """The same run by two ranks on one machine, undisturbed."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    return TrainingRun(folder, *OVERRIDES, FAULT_SWITCH=str(folder / "never")).finish()


def test_a_task_of_an_array_requeues_itself_alone(
    limited: Job, cluster: Cluster, array: tuple[str, Path]
) -> None:
    number, folder = array
    cluster.wait_for(lambda: (folder / "run" / "checkpoints" / "step_000001").exists(), 200)
    cluster.run("scancel", "--batch", "--signal=USR1", f"{number}_2")
    cluster.wait_for(
        lambda: int(cluster.job(f"{number}_2", "Restarts")) > 0, 60, (folder / "2.out").read_text
    )
    (folder / "run.slow").unlink()
    cluster.wait_for(
        lambda: cluster.job(f"{number}_2", "JobState") == "COMPLETED",
        200,
        (folder / "2.out").read_text,
    )
    assert '"state": "finished"' in (folder / "run" / "status.json").read_text()
    assert "resumed from step" in (folder / "2.out").read_text()
    assert cluster.job(f"{number}_1", "JobState") == "COMPLETED"
    assert cluster.job(f"{number}_1", "Restarts") == "0"
    assert "max_response_tokens: 8" in (folder / "1.out").read_text()


def test_a_bad_node_is_found_before_the_run_and_another_job_runs_without_it(
    limited: Job, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.fill_shared_memory("node4")
    job = Job(cluster, tmp_path / "run", overrides=(*OVERRIDES, "run.steps=1"))
    job.wait_for_end(job.number, "FAILED")
    assert "health: bad node4: 0.00 GiB are free in /dev/shm" in job.output()
    successor = re.search(r"job (\d+) takes over, without node4", job.output())[1]  # type: ignore[index]
    job.wait_for_end(successor)
    assert cluster.job(successor, "NodeList") == "node[3,5]"
    kill(pids_on("node4"))
    cluster.start_node("node4")


def test_a_dead_node_is_replaced_by_a_spare(
    limited: Job, reference: TrainingRun, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.wait_for(lambda: cluster.state("node4") == "idle", 60)
    job = Job(cluster, tmp_path / "run", "--spares=1")
    cluster.wait_for(lambda: job.has_checkpoint(2), 200, job.output)
    kill(pids_on("node4"))
    job.switch.unlink()
    job.wait_for_end(job.number)
    assert "attempt 1 on node3 node4, from the beginning" in job.output()
    assert re.search(r"attempt 2 on node3 node5, from \S+step_0000", job.output())
    assert job.weights_equal(reference)
    for node in ("node3", "node5"):  # nothing but Slurm's own daemon holds them
        cluster.wait_for(lambda node=node: len(pids_on(node)) == 1, 30)  # type: ignore[misc]


def test_an_error_that_the_user_has_to_fix_is_not_retried(
    limited: Job, cluster: Cluster, tmp_path: Path
) -> None:
    missing = f"data.train.0.path={tmp_path}/missing.jsonl"
    job = Job(cluster, tmp_path / "run", "--health=off", overrides=(*OVERRIDES, missing))
    job.wait_for_end(job.number, "FAILED")
    assert re.search(r"the run needs a fix: .*missing.jsonl: no such file", job.output())
    assert "attempt 2" not in job.output()


def test_a_job_that_reaches_its_time_limit_requeues_itself_and_ends_bit_for_bit_as_without_it(
    limited: Job, reference: TrainingRun, cluster: Cluster
) -> None:
    cluster.wait_for(lambda: int(cluster.job(limited.number, "Restarts")) > 0, 200, limited.output)
    limited.switch.unlink()
    # Once is enough: a machine that is slow to start ranks would get through only a few steps in each job.
    cluster.run("scontrol", "update", f"JobId={limited.number}", "TimeLimit=30")
    limited.wait_for_end(limited.number)
    assert "asked to stop: saving" in limited.output()
    assert re.search(r"requeued, to resume from \S+step_0000", limited.output())
    assert "resumed from step" in limited.output()
    assert limited.weights_equal(reference)
    for rank, node in enumerate(NODES[:2]):
        assert "spiral_mega" in (limited.folder / "logs" / f"rank{rank}.log").read_text()
        printed = limited.folder.glob(
            f"logs/{limited.number}-0-1/node{rank}/*/attempt_0/0/stderr.log"
        )
        assert len(list(printed)) == 1
        cluster.wait_for(lambda node=node: len(pids_on(node)) == 1, 30)  # type: ignore[misc]
