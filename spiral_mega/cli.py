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

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

# Import a user's own modules (verifiers by import path) from the current folder, as `python -m`
# does.
sys.path.insert(0, "")

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)

ConfigPath = Annotated[
    Path, typer.Argument(help="YAML file of the run, such as configs/demo.yaml.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Overrides, such as rollout.sampling.temperature=0.8.")
]


@app.command()
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train, or resume training from the newest checkpoint in run.dir.

    SIGTERM, SIGINT or SIGUSR1 save a checkpoint and end the run; run.dir/status.json says whether
    it finished.
    """
    with _user_errors():
        loaded = load_config(config, overrides or [])
        with imports_without_gc():
            from spiral_mega.distributed.runtime import start_runtime
            from spiral_mega.train import train as run_training

        with start_runtime() as runtime:
            run_training(loaded, runtime)


@app.command("config")
def show_config(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print the resolved configuration, including all defaults."""
    with _user_errors():
        typer.echo(dump_config(load_config(config, overrides or [])), nl=False)


@app.command("filter")
def filter_problems(
    config: ConfigPath,
    output: Annotated[Path, typer.Option(help="JSONL file for the problems kept.")],
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(min=1, help="Responses sampled for each problem.")] = 8,
    low: Annotated[float, typer.Option(help="Keep problems with a mean reward above this.")] = 0.0,
    high: Annotated[float, typer.Option(help="Keep problems with a mean reward below this.")] = 1.0,
) -> None:
    """Write the training problems that the model sometimes solves: low < mean reward < high."""
    with _user_errors():
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
        typer.Argument(help="YAML file (optional if --model is a run), then overrides."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face model, run folder, or checkpoint; default: model.path."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results; default: run.dir/evaluation.")
    ] = None,
) -> None:
    """Evaluate a model on data.eval with the harnesses of eval.harnesses.

    The same command resumes where it stopped.
    """
    with _user_errors():
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
    run: Annotated[Path, typer.Argument(help="Folder of a run that saved traces.")],
    points: Annotated[int, typer.Option(min=1, help="Intervals of steps to summarize.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    time_limit_s: Annotated[
        float, typer.Option(help="Seconds for one comparison of two answers.")
    ] = 5.0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compare answers.")] = 2,
) -> None:
    """Analyze a run's training traces: diversity, entropy, aggregation, verification, tokens.

    Writes RUN/analysis.json.
    """
    with _user_errors():
        from spiral_mega.analysis.training_traces import analyze_training

        analyze_training(run, points=points, seed=seed, time_limit_s=time_limit_s, workers=workers)
        typer.echo(run / "analysis.json")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs or evaluations to compare.")],
    output: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    max_traces: Annotated[
        int, typer.Option(min=1, help="Most traces to include, over all runs.")
    ] = 10_000,
) -> None:
    """Write one HTML page of curves, evaluations, analyses, times and episodes; it needs no network."""
    with _user_errors():
        from spiral_mega.report.write_page import write_report

        write_report(runs, output, max_traces=max_traces)
        typer.echo(output)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a run to check too.")] = None,
    overrides: Overrides = None,
) -> None:
    """Check this machine, and a run on it, and report problems with their remedies.

    Exits with status 1 if there is an error.
    """
    with _user_errors():
        loaded = None if config is None else load_config(config, overrides or [])
        with imports_without_gc():
            from spiral_mega.doctor import diagnose, format_report

        findings = diagnose(loaded)
        typer.echo(format_report(findings))
        if any(finding.level == "error" for finding in findings):
            raise typer.Exit(1)


@app.command("convert")
def convert_model(
    origin: Annotated[
        Path, typer.Argument(help="Hugging Face folder, checkpoint (step_NNNNNN) or PEFT adapter.")
    ],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    to: Annotated[
        str,
        typer.Option(
            help="hf (adapters merged), dcp (the trainer's checkpoint on FSDP2), dcp-megatron (the "
            "same on megatron-core), torch_dist (megatron-core's own format) or peft (adapter)."
        ),
    ],
    base: Annotated[str | None, typer.Option(help="Base model of a checkpoint or adapter.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Which of two models in a checkpoint: search or aggregation.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: unchanged.")
    ] = None,
    shard_gb: Annotated[
        float, typer.Option(min=0.000001, help="Largest size of a safetensors file, in GB.")
    ] = 4.0,
    verify: Annotated[
        bool, typer.Option(help="Compare the logits of origin and target; loads whole models.")
    ] = False,
) -> None:
    """Convert a model between safetensors, checkpoints of FSDP2 and megatron-core, and adapters.

    Holds only a part of one tensor in memory at a time.
    """
    with _user_errors():
        with imports_without_gc():
            from spiral_mega.conversion import convert
            from spiral_mega.conversion.convert import DTYPES, FORMATS

        if to not in FORMATS or dtype not in (None, *DTYPES):
            raise UserError(
                f"--to {to} --dtype {dtype}: formats are {', '.join(FORMATS)}, types {', '.join(DTYPES)}"
            )
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
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the cluster.")] = 1,
    gpu: Annotated[str, typer.Option(help="Type: h100-80, h200, b200 or a100-80.")] = "h100-80",
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each node.")] = 8,
    median_tokens: Annotated[
        float, typer.Option(min=1, help="Expected median length of a response, in tokens.")
    ] = 1600.0,
    trace: Annotated[
        bool, typer.Option(help="Also trace the memory of an update; takes seconds per layer.")
    ] = False,
    search: Annotated[bool, typer.Option(help="Search for the fastest layouts that fit.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="PNG file of the memory through a step.")
    ] = None,
) -> None:
    """Forecast whether a run fits a cluster and how long its steps take, without the cluster.

    Exits with status 1 if it does not fit.
    """
    with _user_errors():
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
    spares: Annotated[int, typer.Option(min=0, help="Extra nodes that replace bad ones.")] = 0,
    gpus_per_node: Annotated[
        int, typer.Option(min=0, help="GPUs to request on each node; 0: none.")
    ] = 8,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Processes on each node; default: one for each GPU.")
    ] = None,
    time: Annotated[
        str, typer.Option(help="Time limit of one job; the run resumes in the next.")
    ] = "24:00:00",
    stop_seconds: Annotated[
        int, typer.Option(min=1, help="Seconds before the limit in which to save a checkpoint.")
    ] = 240,
    partition: Annotated[str | None, typer.Option(help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account.")] = None,
    container_image: Annotated[
        str | None, typer.Option(help="Container image for pyxis/enroot.")
    ] = None,
    container_mounts: Annotated[
        str | None,
        typer.Option(help="Mounts of the container; default: repository and current folder."),
    ] = None,
    python: Annotated[
        str, typer.Option(help="Python interpreter on the nodes, or in the container.")
    ] = sys.executable,
    health: Annotated[
        str, typer.Option(help="Flags of spiral_mega.launch.health, or 'off' for no check.")
    ] = "",
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="Another option of sbatch, such as --sbatch=--qos=high."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script without submitting it.")
    ] = False,
) -> None:
    """Train on a Slurm cluster: write run.dir/launch/train.sbatch and submit it (docs/guide/cluster.md)."""
    with _user_errors():
        loaded = load_config(config, overrides or [])
        from spiral_mega.launch.slurm import Job, submit, write_script

        if not (ranks_per_node or gpus_per_node):
            raise UserError(
                "--gpus-per-node is 0: set --ranks-per-node to the number of processes on each node"
            )
        job = Job(
            nodes=nodes,
            spares=spares,
            gpus_per_node=gpus_per_node,
            ranks_per_node=ranks_per_node,
            time=time,
            stop_seconds=stop_seconds,
            partition=partition,
            account=account,
            container_image=container_image,
            container_mounts=container_mounts,
            python=python,
            health=health,
            extra=tuple(sbatch or ()),
        )
        script = write_script(loaded, config, overrides or [], job)
        if dry_run:
            typer.echo(script.read_text(), nl=False)
        else:
            typer.echo(f"job {submit(script)}: {script}")


@contextmanager
def _user_errors() -> Iterator[None]:
    """Print errors that the user can fix as their message, with status 2; others keep their traceback."""
    try:
        yield
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        where = f" ({error.filename})" if error.filename else ""
        typer.echo(
            f"error: no space is left to write to{where}: {error.strerror}. Free some; the same "
            "command resumes from the last checkpoint",
            err=True,
        )
        raise typer.Exit(2) from None
