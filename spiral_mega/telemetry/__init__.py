"""Telemetry of a run: metrics, traces, logs, stage times, trackers."""

from spiral_mega.telemetry.atomic import atomic_path, write_json_atomic
from spiral_mega.telemetry.logs import setup_logging, warn_once
from spiral_mega.telemetry.metrics_file import read_metrics
from spiral_mega.telemetry.telemetry import Telemetry
from spiral_mega.telemetry.timing import StageTimer, memory_metrics

__all__ = [
    "StageTimer",
    "Telemetry",
    "atomic_path",
    "memory_metrics",
    "read_metrics",
    "setup_logging",
    "warn_once",
    "write_json_atomic",
]
