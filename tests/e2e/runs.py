"""Real runs of the trainer on the demo model, a few small steps: under torchrun, or in this process with one rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

from spiral_mega.cli import app
from spiral_mega.telemetry import read_metrics
from spiral_mega.telemetry.trace_file import read_traces

SMALL = [
    "run.steps=5",
    "batch.problems=4",
    "checkpoint.every=2",
    "data.eval=[]",
    "rewards.workers=1",
]
UNTIMED = ("time", "memory", "throughput")


class RunFolder:
    """What a run left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def output(self) -> str:
        """Everything that was printed."""
        raise NotImplementedError

    def reached(self, step: int) -> bool:
        """Return whether the metrics of `step` are on disk."""
        path = self.folder / "metrics.jsonl"
        return path.exists() and any(record["step"] >= step for record in read_metrics(self.folder))

    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    def metrics(self) -> list[dict[str, float]]:
        """Return the record of each step, without what depends on the clock."""
        return [_untimed(record) for record in read_metrics(self.folder)]

    def traces(self) -> dict[str, list[dict[str, Any]]]:
        return {
            path.name: read_traces(path)
            for path in sorted((self.folder / "traces").glob("*.parquet"))
        }


class FinishedRun(RunFolder):
    """A run of one rank in this process; see `train_here`."""

    def __init__(self, folder: Path, result: Result) -> None:
        super().__init__(folder)
        self.result = result

    def output(self) -> str:
        return self.result.output


def train_here(
    folder: Path,
    *overrides: str,
    config: str = "configs/demo.yaml",
    status: int = 0,
    **environment: str,
) -> FinishedRun:
    """Run `spiral-mega train` to its end in this process, with one rank, and check the exit status.

    For what does not depend on the number of ranks or on how a process ends: it starts several times faster.
    """
    arguments = ["train", config, f"run.dir={folder}", *SMALL, *overrides]
    return FinishedRun(folder, invoke(arguments, status=status, **environment))


def invoke(arguments: list[str], *, status: int = 0, **environment: str) -> Result:
    """Run a `spiral-mega` command in this process and check the exit status."""
    result = CliRunner().invoke(app, arguments, env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output[-6000:]
    return result


class TrainingRun(RunFolder):
    """`spiral-mega train configs/demo.yaml` under torchrun, in a process group of its own."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        ranks: int = 2,
        config: str = "configs/demo.yaml",
        module: str = "spiral_mega",
        **environment: str,
    ) -> None:
        super().__init__(folder)
        self.log = folder.with_suffix(".log")
        command = [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(ranks),
            ),
            *("-m", module, "train", config, f"run.dir={folder}", *SMALL, *overrides),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def finish(self, *, status: int = 0, timeout: float = 240) -> TrainingRun:
        """Wait for the end and check the exit status."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        assert (code == 0) == (status == 0), f"exit status {code}\n{self.output()[-6000:]}"
        return self

    def wait_for(self, condition: Callable[[], bool], timeout: float = 180) -> None:
        """Wait until `condition` holds while the run continues."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"ended early\n{self.output()[-6000:]}"
            assert time.monotonic() < deadline, f"not within {timeout} s\n{self.output()[-6000:]}"
            time.sleep(0.05)

    def rank_pids(self) -> list[int]:
        """Return the process ids of the ranks, in no particular order."""
        children = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        return [
            pid
            for pid in map(int, children)
            if b"train" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def _untimed(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.split("/")[0] not in UNTIMED}


def copied(run: RunFolder, folder: Path, *, checkpoints: list[int]) -> Path:
    """The folder of `run` as it was after the last of `checkpoints`, with no others, for runs to go on from."""
    shutil.copytree(run.folder, folder, ignore=shutil.ignore_patterns("model", "step_*[0-9]"))
    for step in checkpoints:
        name = f"step_{step:06d}"
        shutil.copytree(run.folder / "checkpoints" / name, folder / "checkpoints" / name)
    return folder


def assert_same_run(left: RunFolder, right: RunFolder) -> None:
    """The same metrics, traces and final weights, bit for bit."""
    assert left.metrics() == right.metrics()
    assert [record["step"] for record in left.metrics()] == [1, 2, 3, 4, 5]
    assert left.traces() == right.traces()
    ours, theirs = (final_weights(run) for run in (left, right))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def final_weights(run: RunFolder) -> dict[str, torch.Tensor]:
    """Every tensor of the files under model/, by file and name."""
    folder = run.folder / "model"
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    return {
        f"{file.relative_to(folder)} {name}": each
        for file in files
        for name, each in load_file(file).items()
    }
