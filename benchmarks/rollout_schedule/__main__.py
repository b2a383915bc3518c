"""Compare rollout schedules: print a table, and write it and a plot to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.rollout_schedule.report import compare, plot, table
from spiral_mega.simulation.workload import QWEN3_4B, QWEN3_8B, Lengths, Shape, engine_model

MODELS = {model.name: model for model in (QWEN3_4B, QWEN3_8B)}


def main(
    output: Annotated[Path, typer.Option(help="folder for schedules.md and schedules.png")],
    gpus: Annotated[
        list[int] | None,
        typer.Option(help="numbers of GPUs; repeat the option; default: 8 64 256 512"),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="batches of problems; figures are medians over them")
    ] = 5,
    model: Annotated[str, typer.Option(help=f"one of {', '.join(MODELS)}")] = QWEN3_4B.name,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of one engine")] = 1,
    problems: Annotated[int, typer.Option(min=1, help="problems of a step")] = 256,
    median: Annotated[
        float, typer.Option(min=1, help="median length of a trace, in tokens")
    ] = 1600.0,
) -> None:
    """Compare rollout schedules on simulated H100 engines at the paper's shape."""
    if model not in MODELS:
        raise typer.BadParameter(f"model is {model!r}: use one of {', '.join(MODELS)}")
    gpus = gpus or [8, 64, 256, 512]
    output.mkdir(parents=True, exist_ok=True)
    engine = engine_model(MODELS[model], tensor_parallel=tensor_parallel)
    shape, lengths = Shape(problems=problems), Lengths(median=median)
    rows = list(compare(gpus, seeds, engine, shape, lengths, tensor_parallel))
    text = table(rows)
    print(text)
    (output / "schedules.md").write_text(text + "\n")
    shown = 64 if 64 in gpus else gpus[0]
    title = f"{model}, {problems} problems, {seeds} seeds: simulated H100 engines of {tensor_parallel} GPU(s)"
    plot(rows, shown, title, output / "schedules.png")


if __name__ == "__main__":
    typer.run(main)
