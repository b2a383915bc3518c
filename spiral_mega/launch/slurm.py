"""A run as a Slurm job: the script, made from launch/slurm/train.sbatch, and its submission."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spiral_mega.config import Config
from spiral_mega.errors import UserError

HOME = Path(__file__).parents[2]
TEMPLATE = Path("launch/slurm/train.sbatch")
SETTINGS = "# (settings)"
STOP_MARGIN_S = 60  # between the end of STOP_SECONDS and of the job's time


@dataclass(frozen=True)
class Job:
    """What a job asks Slurm for. `extra` are more options of sbatch, such as "--qos=high"; null leaves one out."""

    nodes: int
    spares: int = 0
    gpus_per_node: int = 8
    ranks_per_node: int | None = None
    time: str = "24:00:00"
    stop_seconds: int = 240
    partition: str | None = None
    account: str | None = None
    container_image: str | None = None
    container_mounts: str | None = None
    python: str = "python"
    health: str = ""
    extra: tuple[str, ...] = ()


def write_script(config: Config, path: Path, overrides: Sequence[str], job: Job) -> Path:
    """Write run.dir/launch/train.sbatch for `spiral-mega train path overrides...`, which `config` is, and return it."""
    folder = Path(config.run.dir) / "launch"
    script = folder / "train.sbatch"
    text = render(_template(), path, overrides, job, Path(config.run.dir))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        script.write_text(text)
    except OSError as error:
        raise UserError(f"{script} cannot be written ({error.strerror}): choose another run.dir") from error
    return script


def render(template: str, path: Path, overrides: Sequence[str], job: Job, run_dir: Path) -> str:
    """The script: `template` with its #SBATCH options changed to `job`'s, and its settings and arguments filled in."""
    name = f"spiral-{run_dir.name}"
    options = {
        "job-name": name,
        "nodes": str(job.nodes + job.spares),
        "gpus-per-node": str(job.gpus_per_node) if job.gpus_per_node else None,
        "exclusive": "" if job.gpus_per_node else None,
        "time": job.time,
        "signal": f"B:USR1@{job.stop_seconds + STOP_MARGIN_S}",
        "output": str(run_dir / "launch" / "%x-%j.out"),
        "partition": job.partition,
        "account": job.account,
    }
    for option in job.extra:
        key, _, value = option.removeprefix("--").partition("=")
        if not option.startswith("--") or not key:
            raise UserError(f"--sbatch {option!r} is no option of sbatch: write --sbatch=--key=value")
        options[key] = value
    settings = {
        "SPIRAL_HOME": str(HOME),
        "RUN_DIR": str(run_dir),
        "NODES": str(job.nodes),
        "RANKS_PER_NODE": str(job.ranks_per_node or job.gpus_per_node),
        "STOP_SECONDS": str(job.stop_seconds),
        "PYTHON": job.python,
        "HEALTH": job.health,
    }
    if job.container_image is not None:
        settings["CONTAINER_IMAGE"] = job.container_image
        settings["CONTAINER_MOUNTS"] = job.container_mounts or f"{HOME}:{HOME},{Path.cwd()}:{Path.cwd()}"
    lines = []
    for line in template.splitlines():
        if line.startswith("#SBATCH --"):
            key, _, value = line.removeprefix("#SBATCH --").partition("=")
            wanted = options.pop(key, value)
            lines += [] if wanted is None else [_option(key, wanted)]
        elif line == SETTINGS:
            lines += [_option(key, value) for key, value in options.items() if value is not None]
            lines += [f"{key}={shlex.quote(value)}" for key, value in settings.items()]
            lines.append(f"set -- {shlex.join([str(path), *overrides])}")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def submit(script: Path) -> str:
    """Give `script` to sbatch; the job's number. Raises UserError with sbatch's own words."""
    if shutil.which("sbatch") is None:
        raise UserError(f"there is no sbatch here: run this on a login node, or submit {script} there")
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"sbatch refused {script}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def _option(key: str, value: str) -> str:
    return f"#SBATCH --{key}={value}" if value else f"#SBATCH --{key}"


def _template() -> str:
    try:
        return (HOME / TEMPLATE).read_text()
    except OSError as error:
        raise UserError(
            f"{HOME / TEMPLATE} is not there: the scripts come with the repository, not with the package alone; "
            "install it with pip install -e ."
        ) from error
