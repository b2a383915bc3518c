"""The data of the report page: metrics, evaluations, analyses and the index of episodes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spiral_mega.errors import UserError
from spiral_mega.report.curves import PANELS, History, Panel
from spiral_mega.report.page_episodes import EpisodeBlocks, index_episodes
from spiral_mega.telemetry.metrics_file import METRICS_NAME, RESERVED, read_metrics

SIGNIFICANT_DIGITS = 6  # of embedded numbers


def read_page_data(
    folders: Sequence[Path], blocks: EpisodeBlocks, max_traces: int
) -> dict[str, Any]:
    """Return {"panels", "runs"}, and add the runs' episodes to `blocks`.

    These have at most `max_traces` traces over all runs. Raises UserError for a folder that holds
    nothing to show.
    """
    runs: list[dict[str, Any]] = []
    histories: list[History] = []
    for index, folder in enumerate(folders):
        history = read_metrics(folder) if (folder / METRICS_NAME).exists() else []
        episodes = index_episodes(folder, blocks, max_traces // len(folders))
        evaluations = [
            _read_evaluation(path, folder) for path in sorted(folder.rglob("results.json"))
        ]
        if not (history or evaluations or episodes.entries):
            raise UserError(
                f"{folder} holds no metrics.jsonl, no results.json and no traces: name the folder of a run"
            )
        runs.append(
            {
                "index": index,
                "name": _run_name(folder, folders),
                "episodes": episodes.entries,
                "left_out": episodes.left_out,
                "steps": [record["step"] for record in history],
                "metrics": _metrics_by_name(history),
                "evaluations": evaluations,
                "analysis": _read_training_analysis(folder),
            }
        )
        histories.append(history)
    panels = []
    for panel in PANELS:
        metrics = _metrics_of(panel, histories)
        if metrics and panel.style != "stack":  # where time goes has a tab of its own
            panels.append(
                {"title": panel.title, "unit": panel.unit, "style": panel.style, "metrics": metrics}
            )
    return rounded({"panels": panels, "runs": runs})


def _metrics_by_name(history: History) -> dict[str, list[float | None]]:
    """Return each metric's values, one a record; None where a record lacks it."""
    names = dict.fromkeys(name for record in history for name in record if name not in RESERVED)
    metrics = {}
    for name in names:
        metrics[name] = [record.get(name) for record in history]
    return metrics


def _metrics_of(panel: Panel, histories: Sequence[History]) -> list[str]:
    """Return the panel's metrics that any run has."""
    return list(dict.fromkeys(name for history in histories for name in panel.names(history)))


def _read_evaluation(path: Path, folder: Path) -> dict[str, Any]:
    """Read results.json without the values of each problem, and the analysis next to it."""
    results = _read_json(path)
    measures = []
    for measure in results["measures"]:
        measures.append({key: value for key, value in measure.items() if key != "values"})
    analysis = path.with_name("analysis.json")
    return {
        "name": "/".join(
            part for part in path.parent.relative_to(folder).parts if part != "evaluation"
        ),
        "problems": len(results["problems"]),
        "measures": measures,
        "analysis": _read_json(analysis) if analysis.exists() else {},
    }


def _read_training_analysis(folder: Path) -> dict[str, Any] | None:
    """Read what `spiral-mega analyze` wrote, if it was run (an evaluation's analysis has no points)."""
    path = folder / "analysis.json"
    analysis = _read_json(path) if path.exists() else {}
    return analysis if "points" in analysis else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove it, or make it again") from error
    return content


def _run_name(folder: Path, folders: Sequence[Path]) -> str:
    """Return the folder's name, with its parent's where two runs would have the same name."""
    parts = folder.resolve().parts
    namesakes = [other for other in folders if other.resolve().name == parts[-1]]
    return parts[-1] if len(namesakes) == 1 else "/".join(parts[-2:])


def rounded(value: Any) -> Any:
    """Round floats to SIGNIFICANT_DIGITS; a float that is not finite becomes None."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    return value
