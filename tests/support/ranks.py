"""Run a function on several ranks, started by torchrun as a user would start them."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run_ranks(
    world_size: int, function: str, argument: Any = None, *, timeout_s: float = 300.0
) -> list[Any]:
    """Run `function` ("package.module:name") with a Runtime and `argument` on each rank; return its results.

    Argument and results are passed with torch.save. A rank that fails, or ranks that do not end in time, fail the
    test with their whole output.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        torch.save(argument, folder / "argument.pt")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={world_size}",
        ]
        command += ["-m", "tests.support.rank_main", function, name]
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        environment = os.environ | {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with open(folder / "output", "w+") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                status: int | str = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = f"no end within {timeout_s} s"
            finally:
                _end(process)
            output.seek(0)
            printed = output.read()
        if status != 0:
            pytest.fail(f"{function} on {world_size} ranks: {status}\n{printed}", pytrace=False)
        return [
            torch.load(folder / f"result{rank}.pt", weights_only=False)
            for rank in range(world_size)
        ]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the ranks that still run: torchrun first, which ends its children itself."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
