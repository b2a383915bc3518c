"""A run's parts, built in order from cheap to expensive, so that what is wrong shows before weights are loaded."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from spiral_mega.algorithm.objectives import Objective, make_objective
from spiral_mega.algorithm.sampling_plan import SamplingPlan
from spiral_mega.algorithm.weighting import Weighting, make_weighting
from spiral_mega.checkpoint.manager import CheckpointManager
from spiral_mega.checkpoint.resume import find_resumable, load_policies, policy_states
from spiral_mega.config import Config
from spiral_mega.data.problems import fingerprint, load_problems
from spiral_mega.data.sampler import ProblemSampler
from spiral_mega.distributed.collectives import gather_objects
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.models.tokenizer import load_tokenizer, stop_ids
from spiral_mega.policy import FrozenPolicy, Policy, build_policies, check_policy
from spiral_mega.process.stop_request import StopRequest, stop_when_launcher_dies
from spiral_mega.process.watchdog import watched
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards.verifier import make_verifier_pool
from spiral_mega.rollout import build_engines
from spiral_mega.rollout.batch import BatchCollector
from spiral_mega.rollout.pipeline import Pipeline
from spiral_mega.rollout.recording import Collector, Recorder, Replayer
from spiral_mega.rollout.sync import Syncs, WeightSync
from spiral_mega.telemetry import StageTimer, Telemetry, atomic_path, read_metrics, setup_logging
from spiral_mega.telemetry.run_folder import archive_previous, locked_folder, record_failure, set_status
from spiral_mega.telemetry.trace_file import remove_traces
from spiral_mega.traces import Problem
from spiral_mega.validation.load import dump_config
from spiral_mega.validation.models import check_models

log = logging.getLogger(__name__)


@dataclass
class Run:
    """Everything that the loop uses. Built by `open_run`."""

    config: Config
    runtime: Runtime
    folder: Path
    train_problems: list[Problem]
    eval_problems: list[Problem]
    sampler: ProblemSampler
    objective: Objective
    weighting: Weighting
    sync: Syncs
    pipeline: Pipeline | None
    collector: Collector
    policies: dict[str, Policy]  # what is trained, by model: see config/models.py
    frozen: dict[str, FrozenPolicy]
    checkpoints: CheckpointManager
    resume_from: int | None
    telemetry: Telemetry
    timer: StageTimer
    stop: StopRequest

    @property
    def models(self) -> dict[str, FrozenPolicy]:
        """Every model that samples, by name."""
        return {**self.policies, **self.frozen}

    def evaluation_due(self, step: int) -> bool:
        """Whether held-out problems are to be sampled after `step` steps, and were not already; collective.

        They are at the start, at the end, and every `eval.every` steps.
        """
        every, last = self.config.eval.every, self.config.run.steps
        if not self.eval_problems or not (step in (0, last) or (every and step % every == 0)):
            return False
        records = read_metrics(self.folder) if self.runtime.is_main else []
        done = any(record["step"] == step and any(n.startswith("eval/") for n in record) for record in records)
        return not any(gather_objects(done))

    def save(self, step: int) -> None:
        """Start a checkpoint of the state after `step` steps."""
        meta = {
            "world_size": self.runtime.world_size,
            "data": fingerprint(self.train_problems),
            "config": self.config.model_dump(mode="json"),
        }
        with self.timer("checkpoint"):
            self.checkpoints.save(step, self._state(step), meta)

    def resume(self) -> int:
        """Load the checkpoint to go on from, if there is one, and record what is run. The steps done so far."""
        step = self.resume_from or 0
        if self.resume_from is not None:
            state = self._state(0)
            meta = self.checkpoints.read_meta(step)
            if meta["world_size"] != self.runtime.world_size:
                del state[self._rng_key()]
            state = self.checkpoints.load(step, state)
            load_policies(self.policies, state)
            if meta["data"] == fingerprint(self.train_problems):  # else others were accepted: see find_resumable
                self.sampler.load_state_dict(state["sampler"])
            if self._rng_key() in state:
                _set_rng(state[self._rng_key()])
            log.info("resumed from step %d", step)
        if self.runtime.is_main:
            remove_traces(self.folder, step + 1)
            with atomic_path(self.folder / "config.yaml") as path:
                path.write_text(dump_config(self.config))
        self.set_status("running", step)
        return step

    def set_status(self, state: Literal["running", "stopped", "finished"], step: int) -> None:
        """Tell in status.json how the run stands after `step` steps. One that was killed still says "running"."""
        if self.runtime.is_main:
            set_status(self.folder, state, step)

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            **policy_states(self.policies),
            "sampler": self.sampler.state_dict(),
            self._rng_key(): _get_rng(),
        }

    def _rng_key(self) -> str:
        return f"rng_{self.runtime.rank}_of_{self.runtime.world_size}"


@contextmanager
def open_run(config: Config, runtime: Runtime) -> Iterator[Run]:
    """Build the parts of a run and close them again. Collective."""
    folder = Path(config.run.dir)
    with ExitStack() as stack:
        stack.enter_context(locked_folder(folder, runtime))
        stack.enter_context(record_failure(folder, runtime))
        setup_logging(runtime.rank, folder)
        stop = StopRequest()
        stop_when_launcher_dies()
        stack.callback(stop.restore)
        _set_seed(config.run.seed)
        objective = make_objective(config.algorithm, config.frozen)
        check_models(config)
        check_policy(config, runtime.world_size)
        tokenizer = load_tokenizer(config.model)
        prompter = Prompter(config.prompts, tokenizer)
        train_problems = load_problems(config.data.train, prompter.search_prompt, config.data.max_prompt_tokens)
        eval_problems = (
            load_problems(config.data.eval, prompter.search_prompt, config.data.max_prompt_tokens)
            if config.data.eval
            else []
        )
        _warn_of_overlap(train_problems, eval_problems)
        checkpoints = CheckpointManager(folder / "checkpoints", config.checkpoint.keep_last)
        resume_from = find_resumable(checkpoints, config, fingerprint(train_problems), runtime.world_size)
        if resume_from is None and runtime.is_main:
            archive_previous(folder)
        verifier = stack.enter_context(make_verifier_pool(config.rewards, [*train_problems, *eval_problems]))
        telemetry = stack.enter_context(
            Telemetry(
                folder,
                config.telemetry,
                config.run.steps,
                folder.name,
                config.model_dump(mode="json"),
                enabled=runtime.is_main,
            )
        )
        policies, frozen = build_policies(config, runtime)
        sampler = ProblemSampler(len(train_problems), config.run.seed)
        syncs: dict[str, WeightSync] = {}
        pipeline: Pipeline | None = None
        collector: Collector
        if config.rollout.record.read is not None:
            steps = range(resume_from or 0, config.run.steps)
            collector = Replayer(config.rollout.record.read, steps, runtime)
        else:
            engine, engines = build_engines(config, stop_ids(config.model, tokenizer), runtime)
            stack.callback(engine.close)
            canary = prompter.search_prompt(train_problems[0])
            syncs = {
                name: WeightSync(policy, engines[name], canary, config, runtime, frozen=name in frozen)
                for name, policy in (policies | frozen).items()
            }
            make_pipeline = partial(
                Pipeline, engine, prompter, verifier, tokenizer, config.algorithm, config.rollout, stop
            )
            training = make_pipeline(objective.plan)
            if eval_problems:
                pipeline = make_pipeline(SamplingPlan.for_evaluation(config.algorithm, objective.plan))
            collector = BatchCollector(train_problems, sampler, training, config.batch, config.run.seed)
            if config.rollout.record.write is not None:
                collector = Recorder(collector, config.rollout.record.write, runtime)
        stack.enter_context(watched(folder, runtime, config.run.hang_minutes * 60))
        stack.callback(checkpoints.wait)  # also when the run fails: before the engine takes the process group along
        yield Run(
            config=config,
            runtime=runtime,
            folder=folder,
            train_problems=train_problems,
            eval_problems=eval_problems,
            sampler=sampler,
            objective=objective,
            weighting=make_weighting(config.algorithm, objective),
            sync=Syncs(syncs),
            pipeline=pipeline,
            collector=collector,
            policies=policies,
            frozen=frozen,
            checkpoints=checkpoints,
            resume_from=resume_from,
            telemetry=telemetry,
            timer=StageTimer(runtime.synchronize),
            stop=stop,
        )


def _warn_of_overlap(train: Sequence[Problem], held_out: Sequence[Problem]) -> None:
    known = {repr(problem.messages) for problem in train}
    if shared := sum(repr(problem.messages) in known for problem in held_out):
        log.warning("%d of %d evaluation problems are also trained on", shared, len(held_out))


def _set_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _get_rng() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def _set_rng(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
