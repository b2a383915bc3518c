"""`python -m spiral_mega.reproduction`: run what is missing, compare, draw, write. `make reproduce` calls it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from spiral_mega.errors import UserError
from spiral_mega.evaluation.harnesses.pass_at_k import PassAtK
from spiral_mega.evaluation.harnesses.registry import read_harnesses
from spiral_mega.evaluation.harnesses.rsa import Rsa
from spiral_mega.evaluation.harnesses.sequential import Sequential
from spiral_mega.reproduction.figures import draw
from spiral_mega.reproduction.findings import Measured, as_json, compare, efficiency, findings, summary
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
from spiral_mega.reproduction.tables import markdown, write_into
from spiral_mega.telemetry import read_metrics, write_json_atomic
from spiral_mega.validation.load import load_config

EVERY = ",".join(arm.name for arm in ARMS)
BEGAN = time.monotonic()


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to every run, such as optimizer.lr=5e-4.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of runs and results.")] = Path("runs/reproduce"),
    seeds: Annotated[int, typer.Option(min=1, help="Training seeds of each main recipe.")] = 3,
    ablation_seeds: Annotated[int, typer.Option(min=0, help="Training seeds of each ablation.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Updates of each run.")] = 60,
    arms: Annotated[str, typer.Option(help="Recipes, by comma.")] = EVERY,
    start: Annotated[str, typer.Option(help="Model and problems that all begin with: demo, few or copying.")] = "demo",
    at_once: Annotated[int, typer.Option(min=1, help="Runs at a time, one core each.")] = 2,
    document: Annotated[Path | None, typer.Option(help="Markdown file to write the tables into.")] = None,
) -> None:
    """Train every recipe from one start, evaluate alike, and say which of the paper's findings hold."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is told to end too
    try:
        chosen = _chosen(arms)
        if start not in STARTS:
            raise UserError(f"--start is {start!r}: choose of {', '.join(STARTS)}")
        changes, output = [*STARTS[start], *(overrides or [])], output / start
        jobs = jobs_for(output, chosen, seeds, ablation_seeds, steps, changes)
        run_all(jobs, at_once, _tell)
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


def make_report(jobs: Sequence[Job], arms: Sequence[Arm], steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Everything that is shown, as JSON."""
    ks, rsa_steps, budget = _sizes(overrides)
    titles = {START: "start", **{arm.name: arm.title for arm in arms}}
    by_arm = {name: [job for job in jobs if job.arm == name] for name in titles}
    by_arm = {name: found for name, found in by_arm.items() if found}
    measured = {name: _measured(found) for name, found in by_arm.items()}
    ours = measured.get("spiral")
    others = [name for name in by_arm if name not in (START, "spiral")]
    wanted = findings(ks, rsa_steps, budget)
    return {
        "steps": steps,
        "overrides": [each for each in overrides if not any(each in changes for changes in STARTS.values())],
        "ks": ks,
        "problems": len(next(iter(next(iter(measured.values())).values()))[0]),
        "shown": _shown(ks, rsa_steps),
        "arms": {
            name: {
                "title": titles[name],
                "seeds": [job.seed for job in found],
                "measures": summary(measured[name]),
                "tokens": read_tokens(found[0]),
                "success": [read_success(job) for job in found],
                "entropy": [_curve(job) for job in found if name != START],
            }
            for name, found in by_arm.items()
        },
        "comparisons": [as_json(compare(f, ours, measured[o], o)) for o in others for f in wanted] if ours else [],
        "efficiency": {o: efficiency(ks, _passes(ours, ks), _passes(measured[o], ks)) for o in others} if ours else {},
    }


def _chosen(names: str) -> list[Arm]:
    known = {arm.name: arm for arm in ARMS}
    if unknown := [name for name in names.split(",") if name not in known]:
        raise UserError(f"--arms names {unknown[0]!r}: choose of {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def _sizes(overrides: Sequence[str]) -> tuple[list[int], int, int]:
    """The numbers of responses, steps of self-aggregation and the longest budget that are evaluated."""
    harnesses = read_harnesses(load_config(CONFIGS / "task.yaml", overrides).eval.harnesses)
    try:
        (parallel,) = (each for each in harnesses if isinstance(each, PassAtK))
        (recursive,) = (each for each in harnesses if isinstance(each, Rsa))
        (longest,) = (max(each.budgets) for each in harnesses if isinstance(each, Sequential) and each.budgets)
    except ValueError:
        raise UserError(
            "eval.harnesses must hold pass_at_k, majority, rsa, and sequential with budgets, once"
        ) from None
    return parallel.reported_ks(), recursive.steps, longest


def _shown(ks: Sequence[int], steps: int) -> list[str]:
    pass_at = [f"pass_at_k pass {k}" for k in ks]
    return [*pass_at, f"majority majority {max(ks)}", *(f"rsa mean {step}" for step in range(steps + 1))]


def _measured(jobs: Sequence[Job]) -> Measured:
    """By measure, [seeds, problems]."""
    results = [read_results(job) for job in jobs]
    return {name: np.array([each[name] for each in results]) for name in results[0]}


def _passes(measured: Measured, ks: Sequence[int]) -> list[float]:
    return [float(measured[f"pass_at_k pass {k}"].mean()) for k in ks]


def _curve(job: Job) -> list[tuple[int, float]]:
    records = read_metrics(job.folder)
    return [(int(record["step"]), record["entropy/search"]) for record in records if "entropy/search" in record]


def _tell(text: str) -> None:
    typer.echo(f"{(time.monotonic() - BEGAN) / 60:6.1f} min  {text}")


if __name__ == "__main__":
    typer.run(main)
