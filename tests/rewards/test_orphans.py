"""No verifier outlives its trainer, however that ends; and the trainer's script is not run again in its verifiers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1)  # where it hangs, if it does
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite run in the background hands down a SIGINT ignored
sys.path.insert(0, {folder!r})
print("main runs", flush=True)
from spiral_mega.rewards import VerifierPool
verifier = VerifierPool(600, workers=3, verifiers=())
verifier.submit("1", "x", "bad_verifiers:exits").result()  # one process is a replacement
pids = set()
while len(pids) < 3:
    futures = [verifier.submit("0.2", "x", "bad_verifiers:sleeps") for _ in range(2)]
    pids.add(int(verifier.submit("", "x", "bad_verifiers:process_id").result().reward))
print(*pids, flush=True)
for kind in ("holds_the_interpreter", "sleeps_forever"):
    verifier.submit("", "x", "bad_verifiers:" + kind)
import time
time.sleep(0.5)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", ["killed", "terminated", "interrupted", "end of script"])
def test_processes_hung_idle_or_replaced_end_with_the_trainer(ending: str, tmp_path: Path) -> None:
    last = "" if ending == "end of script" else "time.sleep(600)"
    script = (
        SCRIPT.format(folder=str(Path(__file__).parent)) + "print('ready', flush=True)\n" + last
    )
    errors = (tmp_path / "errors").open("w+")
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=errors, text=True
    )
    assert trainer.stdout is not None
    try:
        assert trainer.stdout.readline() == "main runs\n"
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 3
        assert trainer.stdout.readline() == "ready\n"
        signals = {
            "killed": signal.SIGKILL,
            "terminated": signal.SIGTERM,
            "interrupted": signal.SIGINT,
        }
        if ending in signals:
            assert all(alive(pid) for pid in pids)
            os.kill(trainer.pid, signals[ending])
        try:
            trainer.wait(15)
        except subprocess.TimeoutExpired:
            trainer.send_signal(signal.SIGUSR1)
            time.sleep(1)
            errors.seek(0)
            pytest.fail(f"the trainer did not end:\n{errors.read()}")
        deadline = time.monotonic() + 5
        while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in pids if alive(pid)] == []
    finally:
        trainer.kill()
        trainer.wait()


def test_under_torchrun_an_unguarded_script_runs_once_a_rank_and_its_verifiers_stay_light(
    tmp_path: Path,
) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from spiral_mega.rewards import VerifierPool
rank = os.environ["RANK"]
with open("log" + rank, "a") as log: log.write("main ran\\n")
with VerifierPool(5.0, workers=1, verifiers=("exact",)) as verifier:
    print("heavy", verifier.submit("", "x", "bad_verifiers:heavy_modules").result().reward)
    print("crash", verifier.submit("1", "x", "bad_verifiers:exits").result().status)
    print("rewards", [verdict.reward for verdict in verifier.verify(["5", "6"], ["5", "5"], "exact")])
"""
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(script),
        ],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (
        sorted(done.stdout.splitlines())
        == ["crash crash"] * 2 + ["heavy 0.0"] * 2 + ["rewards [1.0, 0.0]"] * 2
    )
    assert [(tmp_path / f"log{rank}").read_text() for rank in (0, 1)] == ["main ran\n"] * 2
