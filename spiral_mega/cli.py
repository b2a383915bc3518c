"""The `spiral-mega` command. Under torchrun every rank runs the same command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from spiral_mega.config.load import dump_config, load_config
from spiral_mega.errors import UserError

# A user's own modules (rewards by import path) are found beside where the command is run, as with `python -m`.
sys.path.insert(0, "")

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ConfigPath = Annotated[Path, typer.Argument(help="YAML file of the run, such as configs/demo.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to it, such as rollout.temperature=0.8.")]


@app.command()
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train, or go on training from the newest checkpoint in run.dir.

    SIGTERM, SIGINT or SIGUSR1 save a checkpoint and end the run; run.dir/status.json says whether it finished.
    """
    with _plain_errors():
        loaded = load_config(config, overrides or [])
        from spiral_mega.runtime import start_runtime
        from spiral_mega.train import train as run_training

        with start_runtime() as runtime:
            run_training(loaded, runtime)


@app.command("config")
def show_config(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print the resolved configuration, every default included."""
    with _plain_errors():
        typer.echo(dump_config(load_config(config, overrides or [])), nl=False)


@app.command("filter")
def filter_problems(
    config: ConfigPath,
    output: Annotated[Path, typer.Option(help="JSONL file to write the kept problems to.")],
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses sampled for each problem.")] = 8,
    low: Annotated[float, typer.Option(help="Keep problems whose mean reward is above this ...")] = 0.0,
    high: Annotated[float, typer.Option(help="... and below this.")] = 1.0,
) -> None:
    """Keep the training problems that the model sometimes solves: low < mean reward < high."""
    with _plain_errors():
        loaded = load_config(config, overrides or [])
        from spiral_mega.filter import filter_by_difficulty
        from spiral_mega.runtime import start_runtime

        with start_runtime() as runtime:
            filter_by_difficulty(loaded, runtime, output, samples=samples, low=low, high=high)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What the user can mend is printed as its message, with status 2; anything else keeps its traceback."""
    try:
        yield
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
