"""What a finished or stopped run prints: held-out accuracy before and after, and where the curves are."""

from __future__ import annotations

from pathlib import Path

from spiral_mega.report.curves import plot_curves
from spiral_mega.report.table import before_after_table
from spiral_mega.telemetry.metrics_file import read_metrics


def summarise(folder: Path) -> None:
    """Print the first and the last evaluation of the run in `folder` side by side, and draw its curves."""
    records = read_metrics(folder)
    if not records:  # stopped before anything was measured
        return
    evaluations = [
        (int(record["step"]), {name: value for name, value in record.items() if name.startswith("eval/")})
        for record in records
    ]
    evaluations = [(step, scores) for step, scores in evaluations if scores]
    if len(evaluations) > 1:
        (first, before), (last, after) = evaluations[0], evaluations[-1]
        print(f"\nHeld-out problems, before (step {first}) and after (step {last}):\n")
        print(before_after_table(before, after))
    print(f"\nCurves: {plot_curves(folder)}")
