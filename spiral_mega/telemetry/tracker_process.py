"""The trainer's handle on a tracker process: start it, notice that it stopped, end it in bounded time."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from spiral_mega.process.signals import signals_blocked
from spiral_mega.telemetry.atomic import write_json_atomic
from spiral_mega.telemetry.metrics_file import METRICS_NAME
from spiral_mega.telemetry.trackers import state_path

log = logging.getLogger(__name__)

FEED = (sys.executable, "-m", "spiral_mega.telemetry.tracker_feed")


class TrackerProcess:
    """The process that feeds one tracker (`tracker_feed`).

    No method raises because of the tracker or waits for it; `wait` is bounded by its deadline.
    `settings` holds project, run_name and config. The process's output, and why it stopped, is in
    run_dir/logs/<name>.log.
    """

    def __init__(self, name: str, run_dir: Path, settings: dict[str, Any], grace_s: float) -> None:
        self.name = name
        self._log_path = run_dir / "logs" / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            write_json_atomic(state_path(run_dir, name), {**settings, **_identity(run_dir, name)})
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._log_path, "ab") as output, signals_blocked():
                self._process = subprocess.Popen(
                    [*FEED, name, run_dir, "--grace-s", str(grace_s)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    start_new_session=True,  # Ctrl-C at the trainer must not reach it
                )
        except (OSError, TypeError, ValueError) as error:
            log.warning("%s is off: its process could not start: %s", name, error)

    def check(self) -> None:
        """Warn, once, that the process stopped, and why."""
        if self._process is not None and self._process.poll() is not None:
            self._warn(self._reason())

    def end(self, done: bool) -> None:
        """Signal the end of the run, and whether it succeeded. Does not wait."""
        self.check()
        if self._process is None or self._process.stdin is None:
            return
        try:
            if done:
                self._process.stdin.write(b"done")
            self._process.stdin.close()
        except OSError:
            pass  # it has just stopped; `wait` reports it

    def wait(self, deadline: float) -> None:
        """Wait until `deadline` (time.monotonic) for the process to finish, then kill it."""
        if self._process is None:
            return
        try:
            if self._process.wait(max(0.0, deadline - time.monotonic())) != 0:
                self._warn(self._reason())
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._warn("it did not finish in time")

    def _reason(self) -> str:
        """Return the last line that the process printed, which is the error of a traceback."""
        status = self._process.returncode if self._process else None
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"exit status {status}, {lines[-1] if lines else 'no output'}"

    def _warn(self, reason: str) -> None:
        log.warning(
            "%s stopped: %s (see %s). Training and metrics.jsonl continue; %s catches up when the "
            "run resumes.",
            self.name,
            reason,
            self._log_path,
            self.name,
        )
        self._process = None


def _identity(run_dir: Path, name: str) -> dict[str, Any]:
    """Return the run's id in the tracker and the offset of its next record: those of the last
    start, if it has any.

    A new or shorter metrics.jsonl belongs to another run, which gets a new id.
    """
    path, metrics = state_path(run_dir, name), run_dir / METRICS_NAME
    size = metrics.stat().st_size if metrics.exists() else 0
    if path.exists():
        state = json.loads(path.read_text(encoding="utf-8"))
        if size > 0 and state["offset"] <= size:
            return {"run_id": state["run_id"], "offset": state["offset"]}
    return {"run_id": secrets.token_hex(4), "offset": 0}


def _environment() -> dict[str, str]:
    """Return this environment, extended so that the package can be imported."""
    root = str(Path(__file__).parents[2])
    paths = [path for path in (os.environ.get("PYTHONPATH"), root) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
