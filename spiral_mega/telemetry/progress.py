"""Progress on standard error: a bar and a small table on a terminal, else one line for each step."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from spiral_mega.telemetry.formatting import format_duration, format_metric

COMPONENTS = ("search", "aggregation")
COMPONENT_METRICS = ("reward", "length", "gated", "truncated", "entropy")
TWO_MODEL_METRICS = tuple(f"optim/grad_norm/{model}" for model in COMPONENTS)
OTHER_METRICS = (
    *("batch/effective_share", "optim/grad_norm", *TWO_MODEL_METRICS),
    *("sampler/log_ratio_mean", "throughput/tokens_per_s", "time/step"),
)
KEY_METRICS = (
    *(f"{name}/{component}" for name in COMPONENT_METRICS for component in COMPONENTS),
    *OTHER_METRICS,
)


class ProgressView(Protocol):
    def show(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def progress_view(total_steps: int, run_name: str) -> ProgressView:
    """Return the view for standard error: a terminal or a file."""
    if sys.stderr.isatty():
        return TerminalView(total_steps, run_name)
    return LineView(total_steps)


class Eta:
    """Estimates the remaining seconds of the run from the pace of the last steps; None before there is a pace."""

    def __init__(self, total_steps: int, window: int = 20) -> None:
        self._total = total_steps
        self._seen: deque[tuple[int, float]] = deque(maxlen=window + 1)

    def update(self, step: int) -> float | None:
        if not self._seen or step != self._seen[-1][0]:
            self._seen.append((step, time.monotonic()))
        (first, start), (last, now) = self._seen[0], self._seen[-1]
        return (now - start) / (last - first) * max(0, self._total - last) if last > first else None


class LineView:
    """One line of name=value words for each record: the key metrics and everything under eval/."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._eta = Eta(total_steps)

    def show(self, step: int, metrics: dict[str, float]) -> None:
        names = [name for name in KEY_METRICS if name in metrics]
        names += [name for name in metrics if name.startswith("eval/")]
        words = [
            f"step={step}/{self._total}",
            *(f"{name}={format_metric(name, metrics[name])}" for name in names),
        ]
        left = self._eta.update(step)
        if left is not None:
            words.append(f"eta={format_duration(left)}")
        print(" ".join(words), file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class TerminalView:
    """A bar, the newest metrics of each component, and the newest evaluation, redrawn in place."""

    def __init__(self, total_steps: int, run_name: str) -> None:
        self._newest: dict[str, float] = {}
        self._eta = Eta(total_steps)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            expand=True,
        )
        self._task = self._bar.add_task(run_name, total=total_steps, left="")
        self._live = Live(self._view(), console=Console(stderr=True), refresh_per_second=1)
        self._live.start(refresh=True)

    def show(self, step: int, metrics: dict[str, float]) -> None:
        self._newest.update(metrics)
        left = self._eta.update(step)
        self._bar.update(
            self._task, completed=step, left="" if left is None else f"{format_duration(left)} left"
        )
        self._live.update(self._view(), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _view(self) -> Group:
        others = [name for name in OTHER_METRICS if name in self._newest]
        evaluated = [name for name in self._newest if name.startswith("eval/")]
        parts = [self._component_table(), _row(others, self._newest), _row(evaluated, self._newest)]
        return Group(self._bar, *(part for part in parts if part.row_count))

    def _component_table(self) -> Table:
        """One row for each component, one column for each metric that a component has."""
        prefixes = {
            name.partition("/")[0] for name in self._newest if name.partition("/")[2] in COMPONENTS
        }
        columns = [name for name in COMPONENT_METRICS if name in prefixes]
        table = _table()
        table.add_column("")
        for column in columns:
            table.add_column(column, justify="right", min_width=8)
        for component in COMPONENTS if columns else ():
            names = [f"{column}/{component}" for column in columns]
            values = [
                format_metric(name, self._newest[name]) if name in self._newest else ""
                for name in names
            ]
            table.add_row(component, *values)
        return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")


def _row(names: list[str], values: dict[str, float]) -> Table:
    """One row of values, each under its name."""
    table = _table()
    for name in names:
        table.add_column(name)
    if names:
        table.add_row(*(format_metric(name, values[name]) for name in names))
    return table
