"""The measures of an evaluation with their intervals: as JSON, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spiral_mega.evaluation.graded_episode import TOKEN_CATEGORIES
from spiral_mega.evaluation.harnesses.harness import Measure
from spiral_mega.seeds import derive_seed
from spiral_mega.statistics.intervals import bootstrap_interval


def results_json(measures: Sequence[Measure], problems: Sequence[str], seed: int) -> dict[str, Any]:
    """Return {"problems": ids, "measures": [...]}.

    Each measure has its mean, its 95 % interval over problems, and `values`. Every measure is
    resampled with the same seed, so that two evaluations of the same problems are resampled alike.
    """
    bootstrap_seed = derive_seed(seed, "bootstrap")
    return {
        "problems": list(problems),
        "measures": [_measure_json(measure, bootstrap_seed) for measure in measures],
    }


def results_table(results: dict[str, Any]) -> str:
    """Format one line a measure: harness, metric, position, mean, interval, tokens a problem."""
    head = ("harness", "metric", "at", "mean", "95 % interval", *TOKEN_CATEGORIES)
    rows = [head, *map(_table_row, results["measures"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_aligned(row, widths) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _measure_json(measure: Measure, seed: int) -> dict[str, Any]:
    return {
        "harness": measure.harness,
        "metric": measure.metric,
        "axis": measure.axis,
        "x": measure.x,
        "parallel": measure.parallel,
        "mean": measure.mean,
        "interval": list(bootstrap_interval(measure.values, seed)),
        "tokens": measure.tokens,
        "budget": measure.budget,
        "values": measure.values,
    }


def _table_row(measure: dict[str, Any]) -> tuple[str, ...]:
    low, high = measure["interval"]
    return (
        measure["harness"],
        measure["metric"],
        f"{measure['axis']} {measure['x']:,}",
        f"{100 * measure['mean']:.1f}",
        f"{100 * low:.1f} to {100 * high:.1f}",
        *(f"{measure['tokens'][category]:,.0f}" for category in TOKEN_CATEGORIES),
    )


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Join the cells of a row: three columns of text to the left, numbers to the right."""
    cells = [*map(str.ljust, row[:3], widths[:3]), *map(str.rjust, row[3:], widths[3:])]
    return "  ".join(cells).rstrip()
