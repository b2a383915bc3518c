"""What a report shows of a run, read from the run's folder: metrics, evaluations, analyses, episodes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spiral_mega.errors import UserError
from spiral_mega.report.curves import PANELS
from spiral_mega.report.episodes import Blocks, collect_episodes
from spiral_mega.telemetry.metrics_file import METRICS_NAME, RESERVED, read_metrics

DIGITS = 6  # significant ones of embedded numbers


def collect(folders: Sequence[Path], blocks: Blocks, max_traces: int) -> dict[str, Any]:
    """The report of these runs; their episodes go to `blocks`, at most `max_traces` traces for all of them.

    Raises UserError for a folder that holds nothing to show.
    """
    runs: list[dict[str, Any]] = []
    for index, folder in enumerate(folders):
        run = _run(folder)
        episodes, left_out = collect_episodes(folder, blocks, max_traces // len(folders))
        if not (run["steps"] or run["evaluations"] or episodes):
            raise UserError(f"{folder} holds no metrics.jsonl, no results.json and no traces: name the folder of a run")
        runs.append({"index": index, "name": _name(folder, folders), "episodes": episodes, "left_out": left_out} | run)
    histories: list[list[dict[str, Any]]] = [run.pop("history") for run in runs]
    panels = [
        {"title": panel.title, "unit": panel.unit, "style": "line" if panel.style == "stack" else panel.style}
        | {"metrics": list(dict.fromkeys(name for history in histories for name in panel.names(history)))}
        for panel in PANELS
        if panel.style != "stack"  # where time goes is a part of its own
    ]
    return rounded({"panels": [panel for panel in panels if panel["metrics"]], "runs": runs})


def _run(folder: Path) -> dict[str, Any]:
    history = read_metrics(folder) if (folder / METRICS_NAME).exists() else []
    names = list(dict.fromkeys(name for record in history for name in record if name not in RESERVED))
    analysis = folder / "analysis.json"
    found = _json(analysis) if analysis.exists() else None
    return {
        "history": history,
        "steps": [record["step"] for record in history],
        "metrics": {name: [record.get(name) for record in history] for name in names},
        "evaluations": [_evaluation(path, folder) for path in sorted(folder.rglob("results.json"))],
        "analysis": found if found is not None and "points" in found else None,
    }


def _evaluation(path: Path, folder: Path) -> dict[str, Any]:
    results = _json(path)
    analysis = path.with_name("analysis.json")
    return {
        "name": "/".join(part for part in path.parent.relative_to(folder).parts if part != "evaluation"),
        "problems": len(results["problems"]),
        "measures": [{key: value for key, value in each.items() if key != "values"} for each in results["measures"]],
        "analysis": _json(analysis) if analysis.exists() else {},
    }


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove it, or make it again") from error
    return found


def _name(folder: Path, folders: Sequence[Path]) -> str:
    """The folder's name, with its parent's where two would be called alike."""
    parts = folder.resolve().parts
    same = [other.resolve().parts for other in folders if other.resolve().name == parts[-1]]
    return parts[-1] if len(same) == 1 else "/".join(parts[-2:])


def rounded(value: Any) -> Any:
    """`value` with floats cut to DIGITS significant digits; one that is not finite is null."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
