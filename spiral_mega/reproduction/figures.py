"""Draw the paper's figures 3, 4, 6 and 8 from what was measured here, as one picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spiral_mega.report.curves import smooth
from spiral_mega.reproduction.runs import START
from spiral_mega.telemetry.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#d1702f", "#3b6fb6", "#4aa5b5", "#4f9d69", "#8d5fa8", "#c2a13a", "#b8494f")
START_COLOR = "#7a7a7a"
Point = tuple[float, Mapping[str, Any]]  # x, summary of the measure
Arms = Mapping[str, Mapping[str, Any]]
Colors = Mapping[str, str]  # by arm


class Panel(NamedTuple):
    """A plot of one measure: where it goes in the picture, and its axes."""

    position: tuple[int, int]
    measure: str
    title: str
    x_label: str
    log_x: bool


PANELS = (
    Panel((0, 0), "pass_at_k pass", "pass@k", "responses k", True),
    Panel((0, 1), "rsa mean", "Recursive self-aggregation", "step", False),
    Panel((0, 2), "majority majority", "Majority of k", "responses k", True),
    Panel((1, 2), "sequential mean", "One response, truncated", "token limit", False),
)


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw means over seeds and problems with 95 % intervals over both, and entropy by seed, smoothed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), dpi=90, layout="constrained")
    axes = figure.subplots(2, 3)
    arms: Arms = report["arms"]
    trained = [name for name in arms if name != START]
    colors = dict(zip(trained, COLORS, strict=False)) | {START: START_COLOR}
    for panel in PANELS:
        _draw_measure(axes[panel.position], panel, arms, colors)
    _draw_entropy(axes[1, 0], arms, colors)
    _draw_accuracy_by_tokens(axes[1, 1], arms, colors)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw_measure(axis: Axes, panel: Panel, arms: Arms, colors: Colors) -> None:
    _frame(axis, panel.title, panel.x_label, "solved")
    if panel.log_x:
        axis.set_xscale("log", base=2)
    else:
        axis.locator_params(axis="x", integer=True)
    for name, arm in arms.items():
        points = series(arm["measures"], panel.measure)
        xs = [x for x, _ in points]
        lows = [summary["crossed"][0] for _, summary in points]
        highs = [summary["crossed"][1] for _, summary in points]
        means = [summary["mean"] for _, summary in points]
        axis.plot(xs, means, color=colors[name], label=arm["title"], marker="o", markersize=3)
        axis.fill_between(xs, lows, highs, color=colors[name], alpha=0.15, linewidth=0)


def _draw_entropy(axis: Axes, arms: Arms, colors: Colors) -> None:
    _frame(axis, "Token entropy of search traces", "step", "nats per token")
    for name, arm in arms.items():
        for number, curve in enumerate(arm["entropy"]):
            steps, values = zip(*curve, strict=True)
            label = arm["title"] if number == 0 else None
            axis.plot(steps, smooth(list(values)), color=colors[name], linewidth=1, label=label)


def _draw_accuracy_by_tokens(axis: Axes, arms: Arms, colors: Colors) -> None:
    _frame(axis, "Accuracy by generated tokens", "tokens per problem", "solved")
    axis.set_xscale("log", base=2)
    for name, arm in arms.items():
        for measure, style in (("rsa mean", "-"), ("majority majority", ":")):
            points = series(arm["measures"], measure)
            tokens = [arm["tokens"][f"{measure} {x:g}"] for x, _ in points]
            means = [summary["mean"] for _, summary in points]
            if points:
                axis.plot(tokens, means, style, color=colors[name], marker="o", markersize=3)
    axis.plot([], [], "-k", label="self-aggregation")
    axis.plot([], [], ":k", label="majority")
    axis.legend(fontsize=8, frameon=False)


def series(measures: Mapping[str, Any], prefix: str) -> list[Point]:
    """Return (x, summary) of the measures "prefix x", ordered by x."""
    points: list[Point] = []
    for name, summary in measures.items():
        if name.startswith(f"{prefix} "):
            points.append((float(name.removeprefix(prefix)), summary))
    return sorted(points, key=lambda point: point[0])


def _frame(axis: Axes, title: str, x_label: str, y_label: str) -> None:
    axis.set_title(title, fontsize=11, fontweight="bold", loc="left")
    axis.set_xlabel(x_label, fontsize=9)
    axis.set_ylabel(y_label, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#e6e6e6", linewidth=0.7)
    axis.set_axisbelow(True)
    if y_label == "solved":
        axis.yaxis.set_major_formatter(
            lambda fraction, _: f"{100 * fraction:g}%" if math.isfinite(fraction) else ""
        )
