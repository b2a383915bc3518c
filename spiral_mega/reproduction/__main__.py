"""`python -m spiral_mega.reproduction`, or `make reproduce`: run what is missing, compare, write."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from spiral_mega.errors import UserError
from spiral_mega.evaluation.harnesses.pass_at_k import PassAtK
from spiral_mega.evaluation.harnesses.registry import read_harnesses
from spiral_mega.evaluation.harnesses.rsa import Rsa
from spiral_mega.evaluation.harnesses.sequential import Sequential
from spiral_mega.reproduction.figures import draw
from spiral_mega.reproduction.findings import (
    Measured,
    compare,
    paper_findings,
    response_factors,
    summarize_measures,
)
from spiral_mega.reproduction.markdown_report import markdown, write_into
from spiral_mega.reproduction.runs import (
    ARMS,
    CONFIGS,
    START,
    STARTS,
    Arm,
    Job,
    jobs_for,
    read_results,
    read_success,
    read_tokens,
    run_all,
)
from spiral_mega.telemetry import read_metrics, write_json_atomic
from spiral_mega.validation.load import load_config

ALL_ARMS = ",".join(arm.name for arm in ARMS)
STARTED = time.monotonic()


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to every run, such as optimizer.lr=5e-4.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of runs and results.")] = Path(
        "runs/reproduce"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Training seeds of each main recipe.")] = 3,
    ablation_seeds: Annotated[
        int, typer.Option(min=0, help="Training seeds of each ablation.")
    ] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Updates of each run.")] = 60,
    arms: Annotated[str, typer.Option(help="Recipes to compare, separated by commas.")] = ALL_ARMS,
    start: Annotated[
        str, typer.Option(help="Model and problems that all runs begin with: demo, few or copying.")
    ] = "demo",
    parallel: Annotated[int, typer.Option(min=1, help="Runs in parallel, one core each.")] = 2,
    document: Annotated[
        Path | None, typer.Option(help="Markdown file to write the tables into.")
    ] = None,
) -> None:
    """Train every recipe from one start, evaluate all, and report which findings of the paper hold."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # unwinds through run_all, which stops its processes
    try:
        chosen = _choose_arms(arms)
        if start not in STARTS:
            raise UserError(f"--start is {start!r}: choose one of {', '.join(STARTS)}")
        changes, output = [*STARTS[start], *(overrides or [])], output / start
        jobs = jobs_for(output, chosen, seeds, ablation_seeds, steps, changes)
        run_all(jobs, parallel, _print_progress)
        report = {"start": start} | make_report(jobs, chosen, steps, changes)
        write_json_atomic(output / "reproduction.json", report)
        draw(report, output / "reproduction.png")
        text = markdown(report)
        (output / "reproduction.md").write_text(text + "\n", encoding="utf-8")
        if document is not None:
            write_into(document, text, start)
        typer.echo(f"\n{text}\n\n{output}/reproduction.json, .png, .md")
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


class Sizes(NamedTuple):
    """What is evaluated: numbers of responses, steps of self-aggregation, longest token budget."""

    ks: list[int]
    rsa_steps: int
    budget: int


def make_report(
    jobs: Sequence[Job], arms: Sequence[Arm], steps: int, overrides: Sequence[str]
) -> dict[str, Any]:
    """Return everything that is shown, as JSON."""
    sizes = _evaluated_sizes(overrides)
    titles = {START: "start", **{arm.name: arm.title for arm in arms}}
    jobs_of = _group_by_arm(jobs, titles)
    measured = {name: _read_measured(of_arm) for name, of_arm in jobs_of.items()}
    any_measure = next(iter(measured[START].values()))
    return {
        "steps": steps,
        "overrides": _without_those_of_starts(overrides),
        "ks": sizes.ks,
        "problems": len(any_measure[0]),
        "shown": _shown_measures(sizes),
        "arms": {
            name: _arm_report(titles[name], of_arm, measured[name])
            for name, of_arm in jobs_of.items()
        },
        **_compare_arms(measured, sizes),
    }


def _group_by_arm(jobs: Sequence[Job], names: Iterable[str]) -> dict[str, list[Job]]:
    """Return the jobs of each arm that has any, in the order of `names`."""
    jobs_of = {}
    for name in names:
        of_arm = [job for job in jobs if job.arm == name]
        if of_arm:
            jobs_of[name] = of_arm
    return jobs_of


def _without_those_of_starts(overrides: Sequence[str]) -> list[str]:
    of_starts = {change for changes in STARTS.values() for change in changes}
    return [override for override in overrides if override not in of_starts]


def _arm_report(title: str, jobs: Sequence[Job], measured: Measured) -> dict[str, Any]:
    return {
        "title": title,
        "seeds": [job.seed for job in jobs],
        "measures": summarize_measures(measured),
        "tokens": read_tokens(jobs[0]),
        "success": [read_success(job) for job in jobs],
        "entropy": [_entropy_curve(job) for job in jobs if job.arm != START],
    }


def _compare_arms(measured: Mapping[str, Measured], sizes: Sizes) -> dict[str, Any]:
    """Compare SPIRAL with every other arm; nothing where SPIRAL was not run."""
    comparisons: list[dict[str, Any]] = []
    efficiency: dict[str, dict[str, float | None]] = {}
    if "spiral" in measured:
        ours = measured["spiral"]
        for name, theirs in measured.items():
            if name in (START, "spiral"):
                continue
            for finding in paper_findings(*sizes):
                comparisons.append(asdict(compare(finding, ours, theirs, name)))
            our_curve, their_curve = _pass_curve(ours, sizes.ks), _pass_curve(theirs, sizes.ks)
            efficiency[name] = response_factors(sizes.ks, our_curve, their_curve)
    return {"comparisons": comparisons, "efficiency": efficiency}


def _choose_arms(names: str) -> list[Arm]:
    known = {arm.name: arm for arm in ARMS}
    if unknown := [name for name in names.split(",") if name not in known]:
        raise UserError(f"--arms names {unknown[0]!r}: choose from {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def _evaluated_sizes(overrides: Sequence[str]) -> Sizes:
    harnesses = read_harnesses(load_config(CONFIGS / "task.yaml", overrides).eval.harnesses)
    try:
        (parallel,) = (each for each in harnesses if isinstance(each, PassAtK))
        (recursive,) = (each for each in harnesses if isinstance(each, Rsa))
        (longest,) = (
            max(each.budgets) for each in harnesses if isinstance(each, Sequential) and each.budgets
        )
    except ValueError:
        raise UserError(
            "eval.harnesses must hold pass_at_k, majority, rsa, and sequential with budgets, each "
            "once"
        ) from None
    return Sizes(parallel.reported_ks(), recursive.steps, longest)


def _shown_measures(sizes: Sizes) -> list[str]:
    """Return the measures of the report's table."""
    pass_at_k = [f"pass_at_k pass {k}" for k in sizes.ks]
    rsa = [f"rsa mean {step}" for step in range(sizes.rsa_steps + 1)]
    return [*pass_at_k, f"majority majority {max(sizes.ks)}", *rsa]


def _read_measured(jobs: Sequence[Job]) -> Measured:
    """Return by measure the values [seeds, problems]."""
    results = [read_results(job) for job in jobs]
    measured = {}
    for name in results[0]:
        measured[name] = np.array([of_seed[name] for of_seed in results])
    return measured


def _pass_curve(measured: Measured, ks: Sequence[int]) -> list[float]:
    return [float(measured[f"pass_at_k pass {k}"].mean()) for k in ks]


def _entropy_curve(job: Job) -> list[tuple[int, float]]:
    """Return (step, token entropy of search) of a training run."""
    records = read_metrics(job.folder)
    return [
        (int(record["step"]), record["entropy/search"])
        for record in records
        if "entropy/search" in record
    ]


def _print_progress(text: str) -> None:
    typer.echo(f"{(time.monotonic() - STARTED) / 60:6.1f} min  {text}")


if __name__ == "__main__":
    typer.run(main)
