"""The `spiral-mega` command. Under torchrun every rank runs the same command."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from spiral_mega.errors import UserError
from spiral_mega.process.imports import imports_without_gc
from spiral_mega.validation.load import dump_config, load_config

_FULL = (errno.ENOSPC, errno.EDQUOT)

# A user's own modules (rewards by import path) are found beside where the command is run, as with `python -m`.
sys.path.insert(0, "")

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ConfigPath = Annotated[Path, typer.Argument(help="YAML file of the run, such as configs/demo.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to it, such as rollout.sampling.temperature=0.8.")]


@app.command()
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train, or go on training from the newest checkpoint in run.dir.

    SIGTERM, SIGINT or SIGUSR1 save a checkpoint and end the run; run.dir/status.json says whether it finished.
    """
    with _plain_errors():
        loaded = load_config(config, overrides or [])
        with imports_without_gc():
            from spiral_mega.distributed.runtime import start_runtime
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
        with imports_without_gc():
            from spiral_mega.distributed.runtime import start_runtime
            from spiral_mega.filter import filter_by_difficulty

        with start_runtime() as runtime:
            filter_by_difficulty(loaded, runtime, output, samples=samples, low=low, high=high)


@app.command("eval")
def evaluate(
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="YAML file (may be left out where --model is a run), then changes to it."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model in Hugging Face form, run folder, or checkpoint; default: model.path.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write to; default: run.dir/evaluation.")] = None,
) -> None:
    """Measure a model on data.eval with the harnesses of eval.harnesses; go on where the same command stopped."""
    with _plain_errors():
        given = settings or []
        has_file = bool(given) and "=" not in given[0]
        with imports_without_gc():
            from spiral_mega.evaluate import evaluate_model, prepare

        prepared = prepare(Path(given[0]) if has_file else None, model, output, given[has_file:])
        from spiral_mega.distributed.runtime import start_runtime

        with start_runtime() as runtime:
            evaluate_model(*prepared, runtime)


@app.command()
def analyze(
    run: Annotated[Path, typer.Argument(help="Folder of a run with traces.")],
    points: Annotated[int, typer.Option(min=1, help="Spans of steps to summarise.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    time_limit_s: Annotated[float, typer.Option(help="Of one comparison of two answers.")] = 5.0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compare answers.")] = 2,
) -> None:
    """Diversity, entropy, aggregation, verification and tokens of a run's training traces, to RUN/analysis.json."""
    with _plain_errors():
        from spiral_mega.analysis.training_traces import analyze_training

        analyze_training(run, points=points, seed=seed, time_limit_s=time_limit_s, workers=workers)
        typer.echo(run / "analysis.json")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs or evaluations, shown side by side.")],
    output: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    max_traces: Annotated[int, typer.Option(min=1, help="Traces to take along, of all runs together.")] = 10_000,
) -> None:
    """Curves, evaluations, analyses, times and episodes of runs, as one HTML page that needs no network."""
    with _plain_errors():
        from spiral_mega.report.write_page import write_report

        write_report(runs, output, max_traces=max_traces)
        typer.echo(output)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a run to look at too.")] = None,
    overrides: Overrides = None,
) -> None:
    """Look for what is wrong with this machine, and with a run on it, and say how to mend it; status 1 if there is."""
    with _plain_errors():
        loaded = None if config is None else load_config(config, overrides or [])
        with imports_without_gc():
            from spiral_mega.doctor import diagnose, format_report

        findings = diagnose(loaded)
        typer.echo(format_report(findings))
        if any(finding.level == "error" for finding in findings):
            raise typer.Exit(1)


@app.command("convert")
def convert_model(
    origin: Annotated[Path, typer.Argument(help="Hugging Face folder, checkpoint (step_NNNNNN) or PEFT adapter.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    to: Annotated[
        str,
        typer.Option(
            help="hf (adapters are merged), dcp (the trainer's checkpoint on FSDP2), dcp-megatron (on megatron-core), "
            "torch_dist (megatron-core's own) or peft (adapter)."
        ),
    ],
    base: Annotated[str | None, typer.Option(help="Model that a checkpoint or adapter belongs to.")] = None,
    model: Annotated[str | None, typer.Option(help="Of a checkpoint of two: search or aggregation.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; without it: as it is.")] = None,
    shard_gb: Annotated[float, typer.Option(min=0.000001, help="Largest safetensors file, in GB.")] = 4.0,
    verify: Annotated[bool, typer.Option(help="Compare logits of both ends; loads whole models.")] = False,
) -> None:
    """Convert a model between safetensors, checkpoints of FSDP2 and megatron-core, and adapters, with a piece of a
    tensor in memory."""
    with _plain_errors():
        with imports_without_gc():
            from spiral_mega.conversion import convert
            from spiral_mega.conversion.convert import DTYPES, FORMS

        if to not in FORMS or dtype not in (None, *DTYPES):
            raise UserError(f"--to {to} --dtype {dtype}: forms are {', '.join(FORMS)}, types {', '.join(DTYPES)}")
        done = convert(
            origin,
            target,
            to,
            base=base,
            model=model,
            dtype=None if dtype is None else DTYPES[dtype],
            max_file_bytes=int(shard_gb * 1e9),
            verify=verify,
        )
        for line in done:
            typer.echo(line)


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    gpu: Annotated[str, typer.Option(help="h100-80, h200, b200 or a100-80.")] = "h100-80",
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    median_tokens: Annotated[float, typer.Option(min=1, help="Median length of a response, assumed.")] = 1600.0,
    trace: Annotated[bool, typer.Option(help="Also trace an update's memory: seconds per layer.")] = False,
    search: Annotated[bool, typer.Option(help="Look for the quickest layouts that fit.")] = False,
    plot: Annotated[Path | None, typer.Option(help="PNG file for the memory through a step.")] = None,
) -> None:
    """Tell whether a run fits a cluster and how long its steps take, without one; status 1 if it does not fit."""
    with _plain_errors():
        loaded = load_config(config, overrides or [])
        with imports_without_gc():
            from spiral_mega.capacity.forecast import forecast

        fits = forecast(
            loaded,
            typer.echo,
            nodes=nodes,
            gpu=gpu,
            gpus_per_node=gpus_per_node,
            median_tokens=median_tokens,
            traced=trace,
            layouts=search,
            picture=plot,
        )
        if not fits:
            raise typer.Exit(1)


@app.command()
def launch(
    config: ConfigPath,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to train on.")],
    overrides: Overrides = None,
    spares: Annotated[int, typer.Option(min=0, help="More nodes, to take the place of bad ones.")] = 0,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs to ask for; 0: none.")] = 8,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Processes on a node; default: its GPUs.")] = None,
    time: Annotated[str, typer.Option(help="Limit of one job; the run goes on in the next.")] = "24:00:00",
    stop_seconds: Annotated[int, typer.Option(min=1, help="Time to save a checkpoint before that.")] = 240,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    container_image: Annotated[str | None, typer.Option(help="Image for pyxis/enroot.")] = None,
    container_mounts: Annotated[str | None, typer.Option(help="Its mounts; default: repository and here.")] = None,
    python: Annotated[str, typer.Option(help="Interpreter on the nodes, or in the container.")] = sys.executable,
    health: Annotated[str, typer.Option(help="Flags of spiral_mega.launch.health, or 'off'.")] = "",
    sbatch: Annotated[list[str] | None, typer.Option(help="More options of sbatch: --sbatch=--qos=high")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; submit nothing.")] = False,
) -> None:
    """Train on a Slurm cluster: write run.dir/launch/train.sbatch and submit it (docs/guide/cluster.md)."""
    with _plain_errors():
        loaded = load_config(config, overrides or [])
        from spiral_mega.launch.slurm import Job, submit, write_script

        if not (ranks_per_node or gpus_per_node):
            raise UserError("--gpus-per-node is 0: say by --ranks-per-node how many processes a node is to run")
        job = Job(nodes, spares, gpus_per_node, ranks_per_node, time, stop_seconds, partition, account,
                  container_image, container_mounts, python, health, tuple(sbatch or ()))  # fmt: skip
        script = write_script(loaded, config, overrides or [], job)
        if dry_run:
            typer.echo(script.read_text(), nl=False)
        else:
            typer.echo(f"job {submit(script)}: {script}")


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What the user can mend is printed as its message, with status 2; anything else keeps its traceback."""
    try:
        yield
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        if error.errno not in _FULL:
            raise
        where = f" ({error.filename})" if error.filename else ""
        typer.echo(
            f"error: no space is left to write to{where}: {error.strerror}. Free some; the same command goes on "
            "from the last checkpoint",
            err=True,
        )
        raise typer.Exit(2) from None
