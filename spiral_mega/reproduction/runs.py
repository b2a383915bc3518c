"""The runs of the reproduction: define them, run several in parallel, and read their results.

Finished runs are kept; a run that was interrupted resumes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spiral_mega.errors import UserError
from spiral_mega.telemetry import read_metrics

CONFIGS = Path("configs/reproduce")
START = "start"  # the model that training begins with, which is evaluated too
COPYING = CONFIGS / "copying"
# What each start changes in the task (docs/results/reproduction.md): `few` trains on the demo's
# first 64 problems only, `copying` begins with an aggregator that copies.
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
POLL_SECONDS, PROGRESS_SECONDS = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm of the comparison: configs/reproduce/<name>.yaml. Ablations run with fewer seeds."""

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
    """A model that is trained (unless it is the start) and evaluated, by `commands` in order."""

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

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def step(self) -> int:
        """Return the number of updates so far, from its metrics."""
        if not (self.folder / "metrics.jsonl").exists():
            return 0
        return max((int(record["step"]) for record in read_metrics(self.folder)), default=0)


def jobs_for(
    output: Path,
    arms: Sequence[Arm],
    seeds: int,
    ablation_seeds: int,
    steps: int,
    overrides: Sequence[str],
) -> list[Job]:
    """Return the start, and every arm's seeds in the order in which they run.

    All arms of a seed come before the next seed, so that an interrupted reproduction has whole
    rounds. Each folder's name holds its arm, steps and seed. `overrides` apply to training and
    evaluation alike; training leaves the held-out problems to the evaluation.
    """
    jobs = [_evaluation_job(output / f"{START}-seed0", START, 0, overrides)]
    for seed, arm in _rounds(arms, seeds, ablation_seeds):
        job = _evaluation_job(output / f"{arm.name}-{steps}-seed{seed}", arm.name, seed, overrides)
        settings = [f"run.dir={job.folder}", f"run.seed={seed}", f"run.steps={steps}"]
        train = [*_program("train"), str(arm.config), *settings, *overrides, "data.eval=[]"]
        job.commands.insert(0, train)
        jobs.append(job)
    return jobs


def _rounds(arms: Sequence[Arm], seeds: int, ablation_seeds: int) -> list[tuple[int, Arm]]:
    """Return (seed, arm) in running order: the main arms seed by seed, then the ablations."""
    rounds = []
    for arm in arms:
        for seed in range(ablation_seeds if arm.ablation else seeds):
            rounds.append((seed, arm))
    return sorted(rounds, key=lambda each: (each[1].ablation, each[0]))


def _evaluation_job(folder: Path, arm: str, seed: int, overrides: Sequence[str]) -> Job:
    command = [
        *_program("eval"),
        str(CONFIGS / "task.yaml"),
        "--output",
        str(folder / "evaluation"),
    ]
    if arm != START:
        command += ["--model", str(folder)]
        overrides = [
            each for each in overrides if not each.startswith("model.path=")
        ]  # where training began
    return Job(arm, seed, folder, [[*command, f"run.dir={folder}", f"run.seed={seed}", *overrides]])


def _program(command: str) -> list[str]:
    return [sys.executable, "-m", "spiral_mega", command]


class Running(NamedTuple):
    """A job's process, which runs the first of `commands`."""

    job: Job
    commands: list[list[str]]
    process: subprocess.Popen[bytes]


def run_all(jobs: Sequence[Job], parallel: int, report: Callable[[str], None]) -> None:
    """Run every job that has no results yet, `parallel` at a time, and pass progress to `report`.

    Raises UserError when a job fails; the others are then stopped. Trainer and evaluation resume
    where they were interrupted.
    """
    waiting = [job for job in jobs if not job.results.exists()]
    report(f"{len(jobs)} models, {len(jobs) - len(waiting)} of them measured before")
    running: list[Running] = []
    last_progress = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop(0)
                running.append(_start(job, job.commands))
            time.sleep(POLL_SECONDS)
            for ended in [each for each in running if each.process.poll() is not None]:
                running.remove(ended)
                _check_status(ended)
                if ended.commands[1:]:
                    running.append(_start(ended.job, ended.commands[1:]))
                    continue
                _check_results(ended.job)
                left = len(waiting) + len(running)
                report(f"{ended.job.name} is measured; {len(jobs) - left} of {len(jobs)}")
            if time.monotonic() - last_progress > PROGRESS_SECONDS:
                last_progress = time.monotonic()
                report(
                    "running: "
                    + ", ".join(f"{each.job.name} (step {each.job.step()})" for each in running)
                )
    finally:
        for each in running:
            each.process.terminate()  # a run saves itself before it ends
        for each in running:
            each.process.wait()


def _start(job: Job, commands: list[list[str]]) -> Running:
    """Start the first of the commands; its output is appended to the job's log."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        return Running(
            job, commands, subprocess.Popen(commands[0], stdout=log, stderr=subprocess.STDOUT)
        )


def _check_status(ended: Running) -> None:
    if ended.process.returncode:
        job, command = ended.job, " ".join(ended.commands[0])
        raise UserError(
            f"{job.name}: {command} ended with status {ended.process.returncode}; its output is in "
            f"{job.log}:\n{_last_lines(job.log)}"
        )


def _check_results(job: Job) -> None:
    if not job.results.exists():
        raise UserError(f"{job.name} was stopped: the same command resumes it")


def _last_lines(path: Path, count: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])


def read_results(job: Job) -> dict[str, list[float]]:
    """Return the values on each problem of every measure, by "harness metric x"."""
    return {name: measure["values"] for name, measure in _read_measures(job)}


def read_success(job: Job) -> list[float | None]:
    """Return the aggregator's success on sets of self-aggregation, by number of right members.

    None where there is no such set.
    """
    analyses = json.loads((job.folder / "evaluation" / "analysis.json").read_text())
    by_sampling: list[list[dict[str, Any]]] = [
        each["aggregation"]["by_right"] for each in analyses.values()
    ]
    by_right = next(entries for entries in by_sampling if entries)
    success = {entry["right"]: entry["value"] for entry in by_right}
    largest_set = max(entry["size"] for entry in by_right)
    return [success.get(right) for right in range(largest_set + 1)]


def read_tokens(job: Job) -> dict[str, float]:
    """Return the tokens that each measure generated for a problem, by "harness metric x"."""
    return {name: measure["tokens"]["generated"] for name, measure in _read_measures(job)}


def _read_measures(job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    for measure in json.loads(job.results.read_text())["measures"]:
        yield f"{measure['harness']} {measure['metric']} {measure['x']}", measure
