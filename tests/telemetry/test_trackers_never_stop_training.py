import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spiral_mega.config.schema import TelemetryConfig
from spiral_mega.telemetry import Telemetry, read_metrics

WANDB = TelemetryConfig(wandb="a-project")
IMPORT_FAILS = "raise ImportError('no such tracker here')"
INIT_FAILS = "class Settings:\n    def __init__(self, **_): pass\ndef init(**_): raise RuntimeError('no init today')"
INIT_HANGS = INIT_FAILS.replace(
    "raise RuntimeError('no init today')", "import time; time.sleep(1000)"
)
RUN = "\ndef init(**_): return Run()\nclass Run:\n    def finish(self, exit_code): pass\n    def log(self, row, step): "
LOG_FAILS = INIT_FAILS + RUN + "raise RuntimeError('no log today')"
LOG_HANGS = INIT_FAILS + RUN + "import time; time.sleep(1000)"
FINISH_HANGS = INIT_FAILS + RUN.replace("pass", "import time; time.sleep(1000)") + "pass"

KILLED_TRAINER = """
import os, signal, sys, time
from spiral_mega.config.schema import TelemetryConfig
from spiral_mega.telemetry import Telemetry
telemetry = Telemetry(sys.argv[1], TelemetryConfig(wandb="a-project"), 2, "a-run", {}, close_timeout_s=1.0)
telemetry.log(1, {"reward/search": 1.0})
time.sleep(1.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def train(
    run_dir: Path, seconds: float, enough: Callable[[], bool] = lambda: False
) -> tuple[float, float]:
    """Log for `seconds` at most, until `enough`, and a little on; return the slowest call and the time to close."""
    telemetry = Telemetry(run_dir, WANDB, 1000, "a-run", {}, close_timeout_s=1.0)
    slowest, step, end = 0.0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        if enough():
            end = min(end, time.monotonic() + 0.2)
        start = time.monotonic()
        telemetry.log(step, {"reward/search": 1.0})
        slowest = max(slowest, time.monotonic() - start)
        time.sleep(0.05)
        step += 1
    start = time.monotonic()
    telemetry.close()
    assert len(read_metrics(run_dir)) == step
    return slowest, time.monotonic() - start


def processes_of(run_dir: Path) -> list[int]:
    """Living processes that were started with this test's mark in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if (
                str(run_dir).encode() in environ.read_bytes()
                and int(environ.parent.name) != os.getpid()
            ):
                found.append(int(environ.parent.name))
        except OSError:
            continue
    return found


def tracker_process(run_dir: Path) -> int:
    """Return the only process of this test; on a busy machine it takes a while to start."""
    deadline = time.monotonic() + 30
    while not (found := processes_of(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.02)
    [pid] = found
    return pid


@pytest.fixture(autouse=True)
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that a test started outlives it."""
    monkeypatch.setenv("TEST_MARK", str(tmp_path))
    yield
    deadline = time.monotonic() + 5
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("tracker", "reason"),
    [
        (IMPORT_FAILS, "no such tracker here"),
        (INIT_FAILS, "no init today"),
        (LOG_FAILS, "no log today"),
    ],
    ids=["import", "init", "log"],
)
def test_a_tracker_that_raises_is_disabled_with_one_warning_that_gives_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tracker: str,
    reason: str,
) -> None:
    (tmp_path / "wandb.py").write_text(tracker)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    train(tmp_path / "run", seconds=20.0, enough=lambda: bool(caplog.records))
    [warning] = caplog.records
    assert warning.levelno == logging.WARNING
    assert reason in warning.getMessage()


@pytest.mark.parametrize(
    "tracker", [INIT_HANGS, LOG_HANGS, FINISH_HANGS], ids=["init", "log", "finish"]
)
def test_a_tracker_that_hangs_slows_no_step_and_ends_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tracker: str
) -> None:
    (tmp_path / "wandb.py").write_text(tracker)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    slowest, closing = train(tmp_path / "run", seconds=1.0)
    assert slowest < 0.5
    assert closing < 3.0
    assert len(caplog.records) == 1


def test_a_server_that_never_answers_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_MODE", "online")
        slowest, closing = train(tmp_path, seconds=3.0)
    assert slowest < 0.5
    assert closing < 3.0


def test_a_missing_account_is_reported_without_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    train(tmp_path, seconds=20.0, enough=lambda: bool(caplog.records))
    [warning] = caplog.records
    assert "API key" in warning.getMessage()


def test_a_tracker_that_is_killed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wandb.py").write_text(LOG_HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    telemetry = Telemetry(tmp_path / "run", WANDB, 2, "a-run", {}, close_timeout_s=1.0)
    telemetry.log(1, {"reward/search": 1.0})
    pid = tracker_process(tmp_path)
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    telemetry.log(2, {"reward/search": 1.0})
    telemetry.close()
    [warning] = caplog.records
    assert "exit status -9" in warning.getMessage()


def test_a_stop_signal_for_the_ranks_does_not_end_the_tracker_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Slurm sends it to every process of a step."""
    (tmp_path / "wandb.py").write_text(LOG_HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    telemetry = Telemetry(tmp_path / "run", WANDB, 2, "a-run", {}, close_timeout_s=1.0)
    pid = tracker_process(tmp_path)
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.2)
    telemetry.log(2, {"reward/search": 1.0})
    assert processes_of(tmp_path) == [pid]
    assert not caplog.records
    telemetry.close()


def test_the_tracker_process_does_not_outlive_a_killed_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text(LOG_HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    trainer = subprocess.run(
        [sys.executable, "-c", KILLED_TRAINER, str(tmp_path / "run")], check=False
    )
    assert trainer.returncode == -signal.SIGKILL
    # The fixture `mark` checks that the tracker process ends too.


def test_settings_that_json_cannot_hold_only_disable_the_tracker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Telemetry(tmp_path, WANDB, 1, "a-run", {"path": Path("not JSON")}) as telemetry:
        telemetry.log(1, {"reward/search": 1.0})
    [warning] = caplog.records
    assert "not JSON serializable" in warning.getMessage()
    assert len(read_metrics(tmp_path)) == 1
