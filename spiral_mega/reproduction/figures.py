"""The paper's plots (figures 3, 4, 6 and 8) of what was measured here, as one picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spiral_mega.report.curves import smooth
from spiral_mega.reproduction.runs import START
from spiral_mega.telemetry.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#d1702f", "#3b6fb6", "#4aa5b5", "#4f9d69", "#8d5fa8", "#c2a13a", "#b8494f")
START_COLOR = "#7a7a7a"
Point = tuple[float, Mapping[str, Any]]


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Lines are means over seeds and problems, bands 95 % intervals over both; entropy: a line a seed, smoothed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), dpi=90, layout="constrained")
    axes = figure.subplots(2, 3)
    arms = report["arms"]
    colors = dict(zip((name for name in arms if name != START), COLORS, strict=False)) | {START: START_COLOR}
    panels = (
        (axes[0, 0], "pass_at_k pass", "pass@k", "responses k", True),
        (axes[0, 1], "rsa mean", "Recursive self-aggregation", "step", False),
        (axes[0, 2], "majority majority", "Majority of k", "responses k", True),
        (axes[1, 2], "sequential mean", "One response, cut", "tokens at most", False),
    )
    for axis, measure, title, label, logarithmic in panels:
        _frame(axis, title, label, "solved")
        if logarithmic:
            axis.set_xscale("log", base=2)
        else:
            axis.xaxis.get_major_locator().set_params(integer=True)
        for name, arm in arms.items():
            _line(axis, series(arm["measures"], measure), colors[name], arm["title"])
    _frame(axes[1, 0], "Token entropy of search traces", "step", "nats per token")
    for name, arm in arms.items():
        for number, curve in enumerate(arm["entropy"]):
            steps, values = zip(*curve, strict=True)
            axes[1, 0].plot(
                steps, smooth(list(values)), color=colors[name], linewidth=1, label=arm["title"] if not number else None
            )
    _frame(axes[1, 1], "Accuracy by tokens generated", "tokens a problem", "solved")
    axes[1, 1].set_xscale("log", base=2)
    for name, arm in arms.items():
        for measure, style in (("rsa mean", "-"), ("majority majority", ":")):
            points = [
                (arm["tokens"][f"{measure} {x:g}"], value["mean"]) for x, value in series(arm["measures"], measure)
            ]
            if points:
                axes[1, 1].plot(*zip(*points, strict=True), style, color=colors[name], marker="o", markersize=3)
    axes[1, 1].plot([], [], "-k", label="self-aggregation")
    axes[1, 1].plot([], [], ":k", label="majority")
    axes[1, 1].legend(fontsize=8, frameon=False)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False
    )
    with atomic_path(path) as hidden:
        figure.savefig(hidden, format="png")


def series(measures: Mapping[str, Any], prefix: str) -> list[Point]:
    """(x, summary) of the measures "prefix x", by x."""
    found = [
        (float(name.removeprefix(prefix)), value) for name, value in measures.items() if name.startswith(f"{prefix} ")
    ]
    return sorted(found, key=lambda point: point[0])


def _line(axis: Axes, points: Sequence[Point], color: str, label: str) -> None:
    xs = [x for x, _ in points]
    lows, highs = ([value["crossed"][side] for _, value in points] for side in (0, 1))
    axis.plot(xs, [value["mean"] for _, value in points], color=color, label=label, marker="o", markersize=3)
    axis.fill_between(xs, lows, highs, color=color, alpha=0.15, linewidth=0)


def _frame(axis: Axes, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=11, fontweight="bold", loc="left")
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#e6e6e6", linewidth=0.7)
    axis.set_axisbelow(True)
    if y == "solved":
        axis.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%" if math.isfinite(share) else "")
