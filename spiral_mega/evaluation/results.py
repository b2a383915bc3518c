"""The measures of an evaluation with their intervals: as JSON, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spiral_mega.evaluation.graded_episode import KINDS_OF_TOKENS, Measure
from spiral_mega.seeds import derive_seed
from spiral_mega.statistics.estimators import bootstrap_interval


def results_json(measures: Sequence[Measure], problems: Sequence[str], seed: int) -> dict[str, Any]:
    """{"problems": ids, "measures": [...]}; each measure with its mean, its 95 % interval over problems, and `values`.

    Everything is resampled with one seed, so that two evaluations of the same problems are resampled alike.
    """
    return {
        "problems": list(problems),
        "measures": [_measure_json(measure, derive_seed(seed, "bootstrap")) for measure in measures],
    }


def results_table(results: dict[str, Any]) -> str:
    """One line a measure: harness, metric, where on its axis, mean [interval], tokens a problem."""
    rows = [("harness", "metric", "at", "mean", "95 % interval", *KINDS_OF_TOKENS)]
    for each in results["measures"]:
        low, high = each["interval"]
        tokens = [f"{each['tokens'][kind]:,.0f}" for kind in KINDS_OF_TOKENS]
        at = f"{each['axis']} {each['x']:,}"
        interval = f"{100 * low:.1f} to {100 * high:.1f}"
        rows.append((each["harness"], each["metric"], at, f"{100 * each['mean']:.1f}", interval, *tokens))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([*map(str.ljust, row[:3], widths[:3]), *map(str.rjust, row[3:], widths[3:])]).rstrip() for row in rows
    ]
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
