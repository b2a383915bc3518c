"""Run schedules over cluster sizes and seeds; make the table and the plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np

from benchmarks.rollout_schedule.bounds import Bound, lower_bound
from spiral_mega.simulation.schedule import POLICIES, SimPolicy, simulate
from spiral_mega.simulation.workload import EngineModel, Lengths, Shape, SimProblem, sample_problems

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = (
    "GPUs",
    "schedule",
    "makespan s",
    "x bound",
    "x even",
    "idle",
    "fixed",
    "own work",
    "moved",
    "length",
)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over seeds.

    `makespan` in seconds; `over_bound` and `over_even` are its ratios to the lower bound and to the even time; `idle`,
    `fixed` and `own` are shares of all GPU time: idle, a step's fixed time, and the decoding and prefill that every
    schedule has to do. `moved` counts traces. `length` is the mean length of the kept problems' traces over that of all
    started ones.
    """

    gpus: int
    schedule: str
    makespan: float
    over_bound: float
    over_even: float
    idle: float
    fixed: float
    own: float
    moved: float
    length: float


def compare(
    gpus: Sequence[int],
    seeds: int,
    model: EngineModel,
    shape: Shape,
    lengths: Lengths,
    tensor_parallel: int = 1,
) -> Iterator[Row]:
    """Yield a row for each number of GPUs and each schedule. All schedules get the same problems."""
    batches = [sample_problems(shape, lengths, seed, round(max(p.extra for p in POLICIES) * shape.problems))
               for seed in range(seeds)]  # fmt: skip
    for count in gpus:
        if count % tensor_parallel:
            raise ValueError(f"{count} GPUs are not divisible into engines of {tensor_parallel}")
        engines = count // tensor_parallel
        bounds = [lower_bound(batch[: shape.problems], model, engines) for batch in batches]
        for policy in POLICIES:
            runs = [
                _measure(policy, batch, shape.problems, model, engines, bound)
                for batch, bound in zip(batches, bounds, strict=True)
            ]
            yield Row(count, policy.name, *(float(x) for x in np.median(np.array(runs), axis=0)))


def _measure(
    policy: SimPolicy,
    batch: Sequence[SimProblem],
    want: int,
    model: EngineModel,
    engines: int,
    bound: Bound,
) -> tuple[float, ...]:
    started = batch[: want + round(policy.extra * want)]
    outcome = simulate(policy, started, model, engines, want)
    total = engines * outcome.makespan
    return (
        outcome.makespan,
        outcome.makespan / bound.makespan,
        outcome.makespan / bound.even,
        max(0.0, 1 - outcome.busy / total),
        model.step * outcome.steps / total,
        bound.own_work / total,
        outcome.moved,
        _mean_length([started[i] for i in outcome.kept]) / _mean_length(started),
    )


def _mean_length(problems: Sequence[SimProblem]) -> float:
    return fmean(length for problem in problems for length in problem.lengths())


def table(rows: Sequence[Row]) -> str:
    """Format rows as an aligned Markdown table."""
    formats = (
        "{}",
        "{}",
        "{:.1f}",
        "{:.2f}",
        "{:.2f}",
        "{:.0%}",
        "{:.0%}",
        "{:.0%}",
        "{:.0f}",
        "{:.2f}",
    )
    cells = [
        [f.format(value) for f, value in zip(formats, astuple(row), strict=True)] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *cells, strict=True)]

    def line(texts: Sequence[str]) -> str:
        padded = [
            t.ljust(w) if i == 1 else t.rjust(w)
            for i, (t, w) in enumerate(zip(texts, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i == 1 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(COLUMNS), line(rule), *map(line, cells)])


def plot(rows: Sequence[Row], gpus: int, title: str, path: Path) -> None:
    """Plot makespan over the bound against GPUs (left), and where GPU time goes at `gpus` GPUs (right)."""
    names = list(dict.fromkeys(row.schedule for row in rows))
    colors = dict(
        zip(names, plt.get_cmap("viridis")(np.linspace(0.0, 0.9, len(names))), strict=True)
    )
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 5), width_ratios=(1, 1.15), layout="constrained"
    )
    for k, name in enumerate(names):
        mine = [row for row in rows if row.schedule == name]
        style = "--" if k >= len(names) - 1 else "-"
        left.plot([r.gpus for r in mine], [r.over_bound for r in mine], style, marker="osv^D<>P"[k % 8],
                  color=colors[name], label=name)  # fmt: skip
    sizes = sorted({row.gpus for row in rows})
    left.set_xscale("log", base=2)
    left.set_xticks(sizes, [str(size) for size in sizes])
    left.axhline(1.0, color="black", linewidth=1)
    left.set(xlabel="GPUs", ylabel="makespan over lower bound", title="Cost of each schedule")
    left.legend(frameon=False, fontsize=8)
    shown = [row for row in rows if row.gpus == gpus]
    makespans = np.array([row.makespan for row in shown])
    start = np.zeros(len(shown))
    rest = [1 - row.own - row.fixed - row.idle for row in shown]
    parts = (
        ("necessary decoding and prefill", [row.own for row in shown], "#2a788e"),
        ("fixed time per step", [row.fixed for row in shown], "#7ad151"),
        ("recomputed or cancelled", rest, "#fde725"),
        ("idle", [row.idle for row in shown], "#d8d8d8"),
    )
    for label, shares, color in parts:
        width = np.maximum(shares, 0.0) * makespans
        right.barh([row.schedule for row in shown], width, left=start, color=color, label=label)
        start += width
    right.axvline(
        makespans[0] / shown[0].over_bound, color="black", linewidth=1, label="lower bound"
    )
    right.invert_yaxis()
    right.set(xlabel="seconds on each GPU", title=f"Where the time goes at {gpus} GPUs")
    right.legend(
        frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=3
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)
