"""The curves of a run as one picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spiral_mega.telemetry.atomic import atomic_path
from spiral_mega.telemetry.formatting import FRACTIONS
from spiral_mega.telemetry.metrics_file import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

History = list[dict[str, Any]]
COLORS = {"search": "#3b6fb6", "aggregation": "#d1702f"}
OTHER_COLORS = ("#4f9d69", "#8d5fa8", "#c2a13a", "#b8494f", "#4aa5b5", "#7a7a7a")
SMOOTH_FROM = 40  # records; a shorter curve is shown as it is


@dataclass(frozen=True)
class Panel:
    """One plot: the metrics named, or all whose name begins with `prefix`, save those in `without`."""

    title: str
    unit: str
    metrics: tuple[str, ...] = ()
    prefix: str | None = None
    without: tuple[str, ...] = ()
    style: str = "line"  # line, percent, log or stack

    def names(self, history: History) -> list[str]:
        """The panel's metrics that the run has, in the panel's order."""
        present = {name: None for record in history for name in record}
        if self.prefix is not None:
            named = [name for name in present if name.startswith(self.prefix) and name not in self.without]
            return [name for name in named if FRACTIONS.search(name)] if self.style == "percent" else named
        return [name for name in self.metrics if name in present]


def _both(kind: str) -> tuple[str, ...]:
    return (f"{kind}/search", f"{kind}/aggregation")


PANELS = (
    Panel("Reward", "mean reward", _both("reward")),
    Panel("Held-out problems", "solved", prefix="eval/", style="percent"),
    Panel("Response length", "tokens", _both("length")),
    Panel("Entropy", "nats per token", _both("entropy")),
    Panel("Traces cut at the limit", "share of traces", _both("truncated"), style="percent"),
    Panel("Traces whose credit was gated", "share of traces", _both("gated"), style="percent"),
    Panel("Effective problems", "share of problems", ("effective/share",), style="percent"),
    Panel(
        "Sampler against trainer",
        "|log ratio| (nats)",
        ("sampler/log_ratio_mean", "sampler/log_ratio_abs_max", *_both("sampler/log_ratio_abs_max")),
        style="log",
    ),
    Panel("Gradient norm", "norm before clipping", ("optim/grad_norm", *_both("optim/grad_norm")), style="log"),
    Panel("Throughput", "tokens per second", ("throughput/tokens_per_s",)),
    Panel("Time of a step", "seconds", prefix="time/", without=("time/eval",), style="stack"),
)


def plot_curves(run_dir: str | Path) -> Path:
    """Draw the metrics of a run to run_dir/curves.png and return that path. Panels that have no metrics are left out.

    Raises FileNotFoundError when the run has no metrics file, ValueError when the file has nothing to draw.
    """
    from matplotlib.figure import Figure  # drawn without pyplot, so no display is needed and no backend is changed

    run_dir = Path(run_dir)
    history = read_metrics(run_dir)
    panels = [(panel, panel.names(history)) for panel in PANELS]
    panels = [(panel, names) for panel, names in panels if names]
    if not panels:
        raise ValueError(f"{run_dir}: its metrics.jsonl has no metric that is drawn")
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.3 * rows + 0.5), dpi=130, layout="constrained")
    figure.suptitle(run_dir.resolve().name, fontsize=14, fontweight="bold", x=0.01, ha="left")
    for number, (panel, names) in enumerate(panels, start=1):
        _draw(figure.add_subplot(rows, columns, number), panel, names, history)
    path = run_dir / "curves.png"
    with atomic_path(path) as hidden:
        figure.savefig(hidden)
    return path


def _draw(axes: Axes, panel: Panel, names: list[str], history: History) -> None:
    from matplotlib.ticker import LogFormatter, MaxNLocator

    axes.set_title(panel.title, fontsize=11, fontweight="bold", loc="left")
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    draw = _stack if panel.style == "stack" else _lines
    draw(axes, panel, names, history)
    # A sampler that agrees with the trainer exactly leaves nothing that a logarithm could show.
    if panel.style == "log" and any(abs(record.get(name, 0.0)) > 0 for record in history for name in names):
        axes.set_yscale("log")
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter(LogFormatter(minor_thresholds=(1, 0.5)))
    if panel.style == "percent":
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
        axes.set_ylim(bottom=0)
    axes.tick_params(which="both", labelsize=8)
    axes.margins(x=0.02)
    if panel.style == "stack":
        axes.margins(y=0.35)  # room for the legend above the areas
        axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper left")
    elif len(names) > 1 or panel.prefix:
        axes.legend(fontsize=8, frameon=False)


def _lines(axes: Axes, panel: Panel, names: list[str], history: History) -> None:
    others = iter(OTHER_COLORS * len(names))
    for name in names:
        steps, values = _series(history, name, abs if panel.style == "log" else float)
        short = name.split("/", 1)[-1]
        color = COLORS.get(short.rpartition("/")[2].split("_")[0]) or (
            next(others) if len(names) > 1 else COLORS["search"]
        )
        if len(steps) < SMOOTH_FROM:
            axes.plot(steps, values, color=color, label=_label(short), linewidth=1.8, marker="o", markersize=3.5)
        else:
            axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
            axes.plot(steps, smooth(values), color=color, label=_label(short), linewidth=1.8)


def _stack(axes: Axes, panel: Panel, names: list[str], history: History) -> None:
    """The stages one upon the other; the whole step, which holds them, as a line."""
    whole = f"{panel.prefix}step"
    stages = [name for name in names if name != whole]
    timed = [record for record in history if any(name in record for name in names)]
    steps = [record["step"] for record in timed]

    def heights(name: str) -> list[float]:
        values = [record.get(name, 0.0) for record in timed]
        values = [value if math.isfinite(value) else 0.0 for value in values]
        return values if len(values) < SMOOTH_FROM else smooth(values)

    if stages:
        labels = [_label(name.split("/", 1)[-1]) for name in stages]
        colors = (*COLORS.values(), *OTHER_COLORS)
        axes.stackplot(steps, [heights(name) for name in stages], labels=labels, colors=colors, alpha=0.85, linewidth=0)
    if whole in names:
        axes.plot(steps, heights(whole), color="#222222", linewidth=1, linestyle="--", label="whole step")


def _series(history: History, name: str, of: Callable[[float], float]) -> tuple[list[int], list[float]]:
    """Steps and values of a metric; a value that is not finite is a gap."""
    points = [(record["step"], float(of(record[name]))) for record in history if name in record]
    return [step for step, _ in points], [value if math.isfinite(value) else math.nan for _, value in points]


def smooth(values: list[float]) -> list[float]:
    """A centred running mean over about a twentieth of the curve; gaps are skipped."""
    reach = max(2, len(values) // 40)
    means = []
    for at in range(len(values)):
        near = [value for value in values[max(0, at - reach) : at + reach + 1] if math.isfinite(value)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


def _label(short: str) -> str:
    return short.replace("_", " ")
