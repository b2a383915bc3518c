"""What a finished or stopped run prints: held-out accuracy before and after, and its curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from spiral_mega.report.curves import plot_curves
from spiral_mega.telemetry.formatting import FRACTIONS, format_metric
from spiral_mega.telemetry.metrics_file import read_metrics


def print_summary(folder: Path) -> None:
    """Print the first and the last evaluation of a run next to each other, and draw its curves."""
    records = read_metrics(folder)
    if not records:  # stopped before anything was measured
        return
    evaluations = {}
    for record in records:
        scores = {name: value for name, value in record.items() if name.startswith("eval/")}
        if scores:
            evaluations[int(record["step"])] = scores
    if len(evaluations) > 1:
        first, *_, last = evaluations
        print(f"\nHeld-out problems, before (step {first}) and after (step {last}):\n")
        print(before_after_table(evaluations[first], evaluations[last]))
    print(f"\nCurves: {plot_curves(folder)}")


def before_after_table(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Format one line a metric: its value before and after, and the change.

    "-" stands where a side lacks it. Fractions (accuracy, pass@k, majority@k, ...) are percentages,
    and their change is in points. Metrics keep the order of `before`; those only in `after` come
    last.
    """
    names = list(dict.fromkeys([*before, *after]))
    rows = [("metric", "before", "after", "change")]
    rows += [
        (name, _cell(name, before), _cell(name, after), _change(name, before, after))
        for name in names
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_aligned(row, widths) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *values = row
    return "  ".join([name.ljust(widths[0]), *map(str.rjust, values, widths[1:])])


def _cell(name: str, values: Mapping[str, float]) -> str:
    return format_metric(name, values[name]) if name in values else "-"


def _change(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    change = after.get(name, math.nan) - before.get(name, math.nan)
    if not math.isfinite(change):
        return "-"
    if FRACTIONS.search(name):
        return f"{100 * change:+.1f} pts"
    return ("+" if change >= 0 else "") + format_metric(name, change)
