"""curves.png: the metrics of a run as one picture of several panels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spiral_mega.telemetry.atomic import atomic_path
from spiral_mega.telemetry.formatting import FRACTIONS
from spiral_mega.telemetry.metrics_file import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

History = list[dict[str, Any]]
COLORS = {"search": "#3b6fb6", "aggregation": "#d1702f"}
OTHER_COLORS = ("#4f9d69", "#8d5fa8", "#c2a13a", "#b8494f", "#4aa5b5", "#7a7a7a")
SMOOTH_FROM = 40  # records; a shorter curve is drawn as it is


@dataclass(frozen=True)
class Panel:
    """One plot: the named metrics, or all that begin with `prefix`, except those in `without`."""

    title: str
    unit: str
    metrics: tuple[str, ...] = ()
    prefix: str | None = None
    without: tuple[str, ...] = ()
    style: Literal["line", "percent", "log", "stack"] = "line"

    def names(self, history: History) -> list[str]:
        """Return the panel's metrics that the run has, in the panel's order."""
        present = {name: None for record in history for name in record}
        if self.prefix is None:
            return [name for name in self.metrics if name in present]
        names = [
            name for name in present if name.startswith(self.prefix) and name not in self.without
        ]
        if self.style == "percent":
            names = [name for name in names if FRACTIONS.search(name)]
        return names


def _of_both_components(metric: str) -> tuple[str, ...]:
    return (f"{metric}/search", f"{metric}/aggregation")


PANELS = (
    Panel("Reward", "mean reward", _of_both_components("reward")),
    Panel("Held-out problems", "solved", prefix="eval/", style="percent"),
    Panel("Response length", "tokens", _of_both_components("length")),
    Panel("Entropy", "nats per token", _of_both_components("entropy")),
    Panel("Truncated traces", "share of traces", _of_both_components("truncated"), style="percent"),
    Panel(
        "Traces without credit by the length gate",
        "share of traces",
        _of_both_components("gated"),
        style="percent",
    ),
    Panel("Effective problems", "share of problems", ("batch/effective_share",), style="percent"),
    Panel(
        "Mismatch of sampler and trainer",
        "|log ratio| (nats)",
        (
            "sampler/log_ratio_mean",
            "sampler/log_ratio_abs_max",
            *_of_both_components("sampler/log_ratio_abs_max"),
        ),
        style="log",
    ),
    Panel(
        "Gradient norm",
        "norm before clipping",
        ("optim/grad_norm", *_of_both_components("optim/grad_norm")),
        style="log",
    ),
    Panel("Throughput", "tokens per second", ("throughput/tokens_per_s",)),
    Panel("Step time", "seconds", prefix="time/", without=("time/eval",), style="stack"),
)


def plot_curves(run_dir: str | Path) -> Path:
    """Draw the metrics of a run to run_dir/curves.png and return that path.

    Panels without metrics are left out. Raises FileNotFoundError when the run has no metrics file,
    ValueError when the file has nothing to draw.
    """
    from matplotlib.figure import (
        Figure,
    )  # used without pyplot: needs no display, and changes no backend

    run_dir = Path(run_dir)
    history = read_metrics(run_dir)
    panels = {panel: names for panel in PANELS if (names := panel.names(history))}
    if not panels:
        raise ValueError(f"{run_dir}: its metrics.jsonl has no metric that is drawn")
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.3 * rows + 0.5), dpi=130, layout="constrained")
    figure.suptitle(run_dir.resolve().name, fontsize=14, fontweight="bold", x=0.01, ha="left")
    for number, (panel, names) in enumerate(panels.items(), start=1):
        _draw_panel(figure.add_subplot(rows, columns, number), panel, names, history)
    path = run_dir / "curves.png"
    with atomic_path(path) as temporary:
        figure.savefig(temporary)
    return path


def _draw_panel(axes: Axes, panel: Panel, names: list[str], history: History) -> None:
    _draw_frame(axes, panel)
    if panel.style == "stack":
        _draw_stack(axes, panel, names, history)
    else:
        _draw_lines(axes, panel, names, history)
    if panel.style == "log" and _has_nonzero(names, history):
        _set_log_scale(axes)
    if panel.style == "percent":
        axes.yaxis.set_major_formatter(lambda fraction, _: f"{100 * fraction:g}%")
        axes.set_ylim(bottom=0)
    axes.tick_params(which="both", labelsize=8)
    axes.margins(x=0.02)
    if panel.style == "stack":
        axes.margins(y=0.35)  # room for the legend above the areas
        axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper left")
    elif len(names) > 1 or panel.prefix:
        axes.legend(fontsize=8, frameon=False)


def _draw_frame(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(panel.title, fontsize=11, fontweight="bold", loc="left")
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)


def _has_nonzero(names: list[str], history: History) -> bool:
    """Return whether a log scale has something to show: not where sampler and trainer agree exactly."""
    return any(abs(record.get(name, 0.0)) > 0 for record in history for name in names)


def _set_log_scale(axes: Axes) -> None:
    from matplotlib.ticker import LogFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter(minor_thresholds=(1, 0.5)))
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))


def _draw_lines(axes: Axes, panel: Panel, names: list[str], history: History) -> None:
    colors = _line_colors(names)
    for name in names:
        steps, values = _series(history, name, abs if panel.style == "log" else float)
        color, label = colors[name], _label(name)
        if len(steps) < SMOOTH_FROM:
            axes.plot(
                steps, values, color=color, label=label, linewidth=1.8, marker="o", markersize=3.5
            )
        else:
            axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
            axes.plot(steps, smooth(values), color=color, label=label, linewidth=1.8)


def _line_colors(names: list[str]) -> dict[str, str]:
    """Give search and aggregation their own colors, and other metrics the rest in turn."""
    others = cycle(OTHER_COLORS)
    colors = {}
    for name in names:
        component = _without_group(name).rpartition("/")[2].split("_")[0]
        if component in COLORS:
            colors[name] = COLORS[component]
        else:
            colors[name] = next(others) if len(names) > 1 else COLORS["search"]
    return colors


def _draw_stack(axes: Axes, panel: Panel, names: list[str], history: History) -> None:
    """Draw the stages of a step on top of each other, and the time of the whole step as a line."""
    whole_step = f"{panel.prefix}step"
    stages = [name for name in names if name != whole_step]
    records = [record for record in history if not record.keys().isdisjoint(names)]
    steps = [record["step"] for record in records]
    if stages:
        labels = [_label(name) for name in stages]
        heights = [_heights(records, name) for name in stages]
        colors = (*COLORS.values(), *OTHER_COLORS)
        axes.stackplot(steps, heights, labels=labels, colors=colors, alpha=0.85, linewidth=0)
    if whole_step in names:
        heights_of_step = _heights(records, whole_step)
        axes.plot(
            steps, heights_of_step, color="#222222", linewidth=1, linestyle="--", label="whole step"
        )


def _heights(records: History, name: str) -> list[float]:
    values = [record.get(name, 0.0) for record in records]
    values = [value if math.isfinite(value) else 0.0 for value in values]
    return values if len(values) < SMOOTH_FROM else smooth(values)


def _series(
    history: History, name: str, transform: Callable[[float], float]
) -> tuple[list[int], list[float]]:
    """Return steps and transformed values of a metric; a value that is not finite is a gap."""
    steps, values = [], []
    for record in history:
        if name in record:
            value = float(transform(record[name]))
            steps.append(record["step"])
            values.append(value if math.isfinite(value) else math.nan)
    return steps, values


def smooth(values: list[float]) -> list[float]:
    """Return a centered running mean over about a twentieth of the curve; gaps are skipped."""
    reach = max(2, len(values) // 40)
    means = []
    for center in range(len(values)):
        window = values[max(0, center - reach) : center + reach + 1]
        present = [value for value in window if math.isfinite(value)]
        means.append(sum(present) / len(present) if present else math.nan)
    return means


def _without_group(name: str) -> str:
    """Return the metric's name without its first part: reward/search is search."""
    return name.split("/", 1)[-1]


def _label(name: str) -> str:
    return _without_group(name).replace("_", " ")
