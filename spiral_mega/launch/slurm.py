"""Submit a run as a Slurm job, with a script made from launch/slurm/train.sbatch."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spiral_mega.config import Config
from spiral_mega.errors import UserError

REPOSITORY = Path(__file__).parents[2]
TEMPLATE = Path("launch/slurm/train.sbatch")
SETTINGS = "# (settings)"
STOP_MARGIN_S = 60  # between the end of STOP_SECONDS and the job's time limit


@dataclass(frozen=True)
class Job:
    """What a job requests from Slurm; None leaves an option out. `extra` are more options, such as "--qos=high"."""

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
    """Write run.dir/launch/train.sbatch for `spiral-mega train path overrides...`; return its path.

    `config` is what `path` and `overrides` resolve to.
    """
    folder = Path(config.run.dir) / "launch"
    script = folder / "train.sbatch"
    text = render(_template(), path, overrides, job, Path(config.run.dir))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        script.write_text(text)
    except OSError as error:
        raise UserError(
            f"{script} cannot be written ({error.strerror}): choose another run.dir"
        ) from error
    return script


def render(template: str, path: Path, overrides: Sequence[str], job: Job, run_dir: Path) -> str:
    """Return `template` with the #SBATCH options of `job`, its settings and its arguments filled in."""
    options = _options(job, run_dir)
    lines = []
    for line in template.splitlines():
        if line.startswith("#SBATCH --"):
            key, _, value = line.removeprefix("#SBATCH --").partition("=")
            wanted = options.pop(key, value)
            if wanted is not None:
                lines.append(_directive(key, wanted))
        elif line == SETTINGS:
            lines += [_directive(key, value) for key, value in options.items() if value is not None]
            lines += [
                f"{key}={shlex.quote(value)}" for key, value in _settings(job, run_dir).items()
            ]
            lines.append(f"set -- {shlex.join([str(path), *overrides])}")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _options(job: Job, run_dir: Path) -> dict[str, str | None]:
    """Return the options of sbatch: a value, "" for a flag, None for an option of the template to drop."""
    options = {
        "job-name": f"spiral-{run_dir.name}",
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
            raise UserError(
                f"--sbatch {option!r} is not an option of sbatch: write --sbatch=--key=value"
            )
        options[key] = value
    return options


def _settings(job: Job, run_dir: Path) -> dict[str, str]:
    """Return the shell variables of the script; launch/slurm/lifecycle.sh describes them."""
    settings = {
        "SPIRAL_HOME": str(REPOSITORY),
        "RUN_DIR": str(run_dir),
        "NODES": str(job.nodes),
        "RANKS_PER_NODE": str(job.ranks_per_node or job.gpus_per_node),
        "STOP_SECONDS": str(job.stop_seconds),
        "PYTHON": job.python,
        "HEALTH": job.health,
    }
    if job.container_image is not None:
        folders = (REPOSITORY, Path.cwd())
        settings["CONTAINER_IMAGE"] = job.container_image
        settings["CONTAINER_MOUNTS"] = job.container_mounts or ",".join(
            f"{each}:{each}" for each in folders
        )
    return settings


def _directive(key: str, value: str) -> str:
    return f"#SBATCH --{key}={value}" if value else f"#SBATCH --{key}"


def submit(script: Path) -> str:
    """Submit `script` with sbatch; return the job number. Raises UserError with sbatch's message."""
    if shutil.which("sbatch") is None:
        raise UserError(
            f"there is no sbatch here: run this on a login node, or submit {script} there"
        )
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"sbatch refused {script}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def _template() -> str:
    try:
        return (REPOSITORY / TEMPLATE).read_text()
    except OSError as error:
        raise UserError(
            f"{REPOSITORY / TEMPLATE} does not exist: the scripts come with the repository, not "
            "with the package; install it with pip install -e ."
        ) from error
