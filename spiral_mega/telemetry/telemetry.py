"""Send every metric of a run to metrics.jsonl, to the terminal, and to the configured trackers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsFloat

from spiral_mega.telemetry.metrics_file import METRICS_NAME, MetricsFile
from spiral_mega.telemetry.progress import ProgressView, progress_view
from spiral_mega.telemetry.tracker_process import TrackerProcess

if TYPE_CHECKING:
    from spiral_mega.config.schema import TelemetryConfig

log = logging.getLogger(__name__)


class Telemetry:
    """Receives the metrics of the training loop. With `enabled=False` (every rank but one) it does
    nothing.

        loop -> metrics.jsonl -> tracker processes (W&B, TensorBoard), which follow the file
             -> terminal

    run_dir/metrics.jsonl is the record. The terminal and the trackers may fail without consequence:
    each is then off, with one warning. Use it as a context manager, or call `close`; leaving the
    context by an exception marks the run as failed in the trackers. `close` waits at most
    `close_timeout_s` seconds.

    Raises OSError when run_dir cannot be written.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: TelemetryConfig,
        total_steps: int,
        run_name: str,
        resolved_config: dict[str, Any],
        *,
        enabled: bool = True,
        close_timeout_s: float = 30.0,
    ) -> None:
        self._file: MetricsFile | None = None
        self._view: ProgressView | None = None
        self._trackers: list[TrackerProcess] = []
        self._close_timeout_s = close_timeout_s
        if not enabled:
            return
        run_dir = Path(run_dir)
        self._file = MetricsFile(run_dir / METRICS_NAME)
        settings = {"project": config.wandb, "run_name": run_name, "config": resolved_config}
        for name, wanted in (
            ("wandb", config.wandb is not None),
            ("tensorboard", config.tensorboard),
        ):
            if wanted:
                self._trackers.append(TrackerProcess(name, run_dir, settings, close_timeout_s))
        self._view = progress_view(total_steps, run_name)

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Record `metrics` of `step`; several calls for one step are merged.

        On return the line is with the operating system. Raises OSError when the file cannot be
        written, TypeError for a value that is not a number, ValueError for a metric called "step"
        or "time".
        """
        if self._file is None:
            return
        self._file.append(step, metrics)
        for tracker in self._trackers:
            tracker.check()
        if self._view is not None:
            try:
                self._view.show(step, {name: float(value) for name, value in metrics.items()})
            except (OSError, ValueError) as error:  # the terminal or its pipe is closed
                log.warning("progress is no longer shown: %s", error)
                self._close_view()

    def close(self, *, failed: bool = False) -> None:
        """Close the terminal view and the trackers. Safe to call again."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        self._close_view()
        deadline = time.monotonic() + self._close_timeout_s
        for tracker in self._trackers:
            tracker.end(done=not failed)
        for tracker in self._trackers:
            tracker.wait(deadline)

    def _close_view(self) -> None:
        view, self._view = self._view, None
        with suppress(OSError, ValueError):
            if view is not None:
                view.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=kind is not None)
