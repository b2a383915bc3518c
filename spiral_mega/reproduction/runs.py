"""The runs of the reproduction, and running them: some at a time, finished ones kept, cut ones gone on with."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spiral_mega.errors import UserError
from spiral_mega.telemetry import read_metrics

CONFIGS = Path("configs/reproduce")
START = "start"
COPYING = CONFIGS / "copying"
# What each start changes in the task (docs/results/reproduction.md): `few` trains on the demo's first 64 problems only,
# `copying` begins with an aggregator that copies.
STARTS: dict[str, tuple[str, ...]] = {
    "demo": (),
    "few": ("data.train.0.limit=64",),
    "copying": (
        f"model.path={COPYING}/model",
        f"data.train.0.path={COPYING}/train.jsonl",
        f"data.eval.0.path={COPYING}/heldout.jsonl",
        "prompts.trace='#{number} {trace}'",
        "prompts.unfinished='#{number} {trace} ...'",
    ),
}
POLL_SECONDS, TELL_SECONDS = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class Arm:
    """One recipe: `configs/reproduce/<name>.yaml`. Ablations are run with fewer seeds."""

    name: str
    title: str
    ablation: bool = False

    @property
    def config(self) -> Path:
        return CONFIGS / f"{self.name}.yaml"


ARMS = (
    Arm("spiral", "SPIRAL"),
    Arm("grpo", "GRPO, 12 samples, twice the length"),
    Arm("grpo24", "GRPO, 24 samples", ablation=True),
    Arm("separate", "separate rewards"),
    Arm("balanced", "SPIRAL, balanced sets", ablation=True),
    Arm("unbiased", "SPIRAL, unbiased weights", ablation=True),
    Arm("gated", "SPIRAL, length gate", ablation=True),
)


@dataclass(slots=True)
class Job:
    """A model that is trained (unless it is the start) and evaluated, by one process after the other."""

    arm: str
    seed: int
    folder: Path
    commands: list[list[str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def results(self) -> Path:
        return self.folder / "evaluation" / "results.json"

    def step(self) -> int:
        """Updates so far, as its metrics tell."""
        if not (self.folder / "metrics.jsonl").exists():
            return 0
        return max((int(record["step"]) for record in read_metrics(self.folder)), default=0)


def jobs_for(
    output: Path, arms: Sequence[Arm], seeds: int, ablation_seeds: int, steps: int, overrides: Sequence[str]
) -> list[Job]:
    """The start, and every arm's seeds in the order they are run: a cut reproduction has whole rounds of arms.

    Each folder's name tells its arm, steps and seed. `overrides` go to training and evaluation alike; training leaves
    the held-out problems to the evaluation.
    """
    wanted = [(seed, arm) for arm in arms for seed in range(ablation_seeds if arm.ablation else seeds)]
    jobs = [_evaluated(output / f"{START}-seed0", START, 0, overrides)]
    for seed, arm in sorted(wanted, key=lambda each: (each[1].ablation, each[0])):
        job = _evaluated(output / f"{arm.name}-{steps}-seed{seed}", arm.name, seed, overrides)
        settings = [f"run.dir={job.folder}", f"run.seed={seed}", f"run.steps={steps}"]
        job.commands.insert(0, [*_program("train"), str(arm.config), *settings, *overrides, "data.eval=[]"])
        jobs.append(job)
    return jobs


def _evaluated(folder: Path, arm: str, seed: int, overrides: Sequence[str]) -> Job:
    command = [*_program("eval"), str(CONFIGS / "task.yaml"), "--output", str(folder / "evaluation")]
    if arm != START:
        command += ["--model", str(folder)]
        overrides = [each for each in overrides if not each.startswith("model.path=")]  # where training began
    return Job(arm, seed, folder, [[*command, f"run.dir={folder}", f"run.seed={seed}", *overrides]])


def _program(command: str) -> list[str]:
    return [sys.executable, "-m", "spiral_mega", command]


def run_all(jobs: Sequence[Job], at_once: int, tell: Callable[[str], None]) -> None:
    """Bring every job to its results, `at_once` at a time. Raises UserError when one fails; the others are stopped.

    A job whose results exist is kept as it is; the trainer and the evaluation go on where they were cut.
    """
    waiting = [job for job in jobs if not job.results.exists()]
    tell(f"{len(jobs)} models, {len(jobs) - len(waiting)} of them measured before")
    running: list[tuple[Job, list[list[str]], subprocess.Popen[bytes]]] = []
    told = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running.append(_next(job, job.commands))
            time.sleep(POLL_SECONDS)
            for entry in [entry for entry in running if entry[2].poll() is not None]:
                running.remove(entry)
                job, commands, process = entry
                if process.returncode:
                    raise UserError(f"{job.name}: {' '.join(commands[0])} ended with status {process.returncode}; "
                                    f"its output is in {_log(job)}:\n{_tail(_log(job))}")  # fmt: skip
                if commands[1:]:
                    running.append(_next(job, commands[1:]))
                    continue
                if not job.results.exists():
                    raise UserError(f"{job.name} was stopped: the same command goes on with it")
                left = len(waiting) + len(running)
                tell(f"{job.name} is measured; {len(jobs) - left} of {len(jobs)}")
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                tell("running: " + ", ".join(f"{job.name} (step {job.step()})" for job, _, _ in running))
    finally:
        for _, _, process in running:
            process.terminate()  # a run that is told to end saves itself first
        for _, _, process in running:
            process.wait()


def _next(job: Job, commands: list[list[str]]) -> tuple[Job, list[list[str]], subprocess.Popen[bytes]]:
    """Start the first of the commands; its output is added to the job's log."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with _log(job).open("ab") as log:
        return job, commands, subprocess.Popen(commands[0], stdout=log, stderr=subprocess.STDOUT)


def _log(job: Job) -> Path:
    return job.folder.with_suffix(".log")


def _tail(path: Path, lines: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def read_results(job: Job) -> dict[str, list[float]]:
    """The values on each problem of every measure, by "harness metric x"."""
    return {name: each["values"] for name, each in _read_measures(job)}


def read_success(job: Job) -> list[float | None]:
    """The aggregator's success on the sets of self-aggregation, by the number of their right members; None: no set."""
    analyses = json.loads((job.folder / "evaluation" / "analysis.json").read_text()).values()
    found: list[dict[str, Any]] = next(a["aggregation"]["by_right"] for a in analyses if a["aggregation"]["by_right"])
    values = {each["right"]: each["value"] for each in found}
    return [values.get(right) for right in range(max(each["size"] for each in found) + 1)]


def read_tokens(job: Job) -> dict[str, float]:
    """The tokens that each measure had the model write, for a problem."""
    return {name: each["tokens"]["generated"] for name, each in _read_measures(job)}


def _read_measures(job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in json.loads(job.results.read_text())["measures"]:
        yield f"{each['harness']} {each['metric']} {each['x']}", each
