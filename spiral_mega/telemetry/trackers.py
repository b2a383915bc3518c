"""The trackers that a tracker process feeds. Each may raise or hang without harm: see `tracker_feed`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """A service or file format that shows metrics."""

    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        """Show `metrics` of `step`, recorded at `seconds` since 1970. Steps repeat after a resume."""

    def close(self, exit_code: int) -> None:
        """Finish. `exit_code` is 0 unless the run failed."""


class WandbTracker:
    """Weights & Biases. A resumed run keeps its id; steps that it computes again keep their first values."""

    def __init__(self, run_dir: Path, settings: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=settings["project"],
            name=settings["run_name"],
            id=settings["run_id"],
            config=settings["config"],
            resume="allow",
            dir=run_dir,
            # System metrics of the trainer, not of this process.
            settings=wandb.Settings(console="off", x_stats_pid=os.getppid()),
        )

    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        self._run.log({"_timestamp": seconds, **metrics}, step=step)

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class TensorBoardTracker:
    """TensorBoard event files in run_dir/tensorboard, one for each start of the run.

    Written with the tensorboard package alone, so that this process does not load torch.
    """

    def __init__(self, run_dir: Path, settings: dict[str, Any]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        self._started = False

    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if not self._started:
            # TensorBoard then drops what an earlier start of the run recorded from this step on.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=seconds, step=step, session_log=start))
            self._started = True
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=seconds, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, exit_code: int) -> None:
        self._writer.close()


TRACKERS: dict[str, Callable[[Path, dict[str, Any]], Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
}


def state_path(run_dir: Path, name: str) -> Path:
    """Return the file of a tracker's settings, its id of the run, and its offset in metrics.jsonl (bytes)."""
    return run_dir / "trackers" / f"{name}.json"
