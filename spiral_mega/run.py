"""Open a run: build its parts from cheap to expensive, so that mistakes show before weights are
loaded.

folder, logs, signals -> recipe, checks of models -> problems -> checkpoint to resume from
    -> verifiers, telemetry -> policies -> engines, pipelines -> watchdog
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

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
from spiral_mega.rollout import Sampler, build_engines
from spiral_mega.rollout.batch import BatchCollector
from spiral_mega.rollout.pipeline import Pipeline
from spiral_mega.rollout.recording import Collector, Recorder, Replayer
from spiral_mega.rollout.sync import Syncs, WeightSync
from spiral_mega.telemetry import StageTimer, Telemetry, atomic_path, read_metrics, setup_logging
from spiral_mega.telemetry.run_folder import (
    archive_previous,
    locked_folder,
    record_failure,
    set_status,
)
from spiral_mega.telemetry.trace_file import remove_traces
from spiral_mega.traces import Problem
from spiral_mega.validation.load import dump_config
from spiral_mega.validation.models import check_models

log = logging.getLogger(__name__)


@dataclass
class Run:
    """Everything that the training loop uses; built by `open_run`.

    `policies` are trained, `frozen` only sample; both by the name of their model (see
    config/model_set.py). `eval_pipeline` is None without held-out problems, and in a replay, which
    has no engine.
    """

    config: Config
    runtime: Runtime
    folder: Path
    train_problems: list[Problem]
    eval_problems: list[Problem]
    sampler: ProblemSampler
    objective: Objective
    weighting: Weighting
    sync: Syncs
    collector: Collector
    eval_pipeline: Pipeline | None
    policies: dict[str, Policy]
    frozen: dict[str, FrozenPolicy]
    checkpoints: CheckpointManager
    resume_from: int | None
    telemetry: Telemetry
    timer: StageTimer
    stop: StopRequest

    @property
    def models(self) -> dict[str, FrozenPolicy]:
        """Return every model that samples, by name."""
        return {**self.policies, **self.frozen}

    def evaluation_due(self, step: int) -> bool:
        """Return whether to sample the held-out problems after `step` steps; collective.

        They are sampled at the start, at the end, and every `eval.every` steps, once each.
        """
        every, last = self.config.eval.every, self.config.run.steps
        due = step in (0, last) or (every is not None and step % every == 0)
        if not self.eval_problems or not due:
            return False
        evaluated = self.runtime.is_main and _is_evaluated(self.folder, step)
        return not any(gather_objects(evaluated))

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
        """Load the checkpoint to resume from, if any; return the number of completed steps.

        Also removes traces of later steps, and writes config.yaml and status.json.
        """
        step = self.resume_from or 0
        if self.resume_from is not None:
            state = self._state(0)
            meta = self.checkpoints.read_meta(step)
            if meta["world_size"] != self.runtime.world_size:
                del state[self._rng_key()]
            state = self.checkpoints.load(step, state)
            load_policies(self.policies, state)
            # Other problems, which find_resumable has accepted, are sampled from their first epoch.
            if meta["data"] == fingerprint(self.train_problems):
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
        """Write the state after `step` steps to status.json; after a kill it stays "running"."""
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
    """Build the parts of a run, and close them in reverse order. Collective.

    Raises UserError for what the user can fix, before weights are loaded where possible.
    """
    folder = Path(config.run.dir)
    with ExitStack() as stack:
        stop = _open_folder(folder, runtime, stack)
        _set_seed(config.run.seed)
        objective = make_objective(config.algorithm, config.frozen)
        check_models(config)
        check_policy(config, runtime.world_size)
        data = _load_data(config)
        checkpoints, resume_from = _find_checkpoint(folder, config, data, runtime)
        problems = [*data.train_problems, *data.eval_problems]
        verifier = stack.enter_context(make_verifier_pool(config.rewards, problems))
        telemetry = stack.enter_context(_make_telemetry(folder, config, runtime))
        policies, frozen = build_policies(config, runtime)
        sampler = ProblemSampler(len(data.train_problems), config.run.seed)
        if config.rollout.record.read is not None:
            steps = range(resume_from or 0, config.run.steps)
            rollout = _Rollout(Syncs({}), Replayer(config.rollout.record.read, steps, runtime))
        else:
            engine, sync = _build_engines(config, data, policies, frozen, runtime)
            stack.callback(engine.close)
            make_pipeline = partial(
                Pipeline,
                engine,
                data.prompter,
                verifier,
                data.tokenizer,
                config.algorithm,
                config.rollout,
                stop,
            )
            rollout = _build_rollout(config, data, objective, sync, make_pipeline, sampler, runtime)
        stack.enter_context(watched(folder, runtime, config.run.hang_minutes * 60))
        # Also when the run fails, and before the engine closes, which ends the process group.
        stack.callback(checkpoints.wait)
        yield Run(
            config=config,
            runtime=runtime,
            folder=folder,
            train_problems=data.train_problems,
            eval_problems=data.eval_problems,
            sampler=sampler,
            objective=objective,
            weighting=make_weighting(config.algorithm, objective),
            sync=rollout.sync,
            collector=rollout.collector,
            eval_pipeline=rollout.eval_pipeline,
            policies=policies,
            frozen=frozen,
            checkpoints=checkpoints,
            resume_from=resume_from,
            telemetry=telemetry,
            timer=StageTimer(runtime.synchronize),
            stop=stop,
        )


@dataclass(frozen=True, slots=True)
class _Data:
    """The problems, and what turns them into prompts."""

    tokenizer: PreTrainedTokenizerBase
    prompter: Prompter
    train_problems: list[Problem]
    eval_problems: list[Problem]


@dataclass(frozen=True, slots=True)
class _Rollout:
    """Where batches come from, and how weights get there."""

    sync: Syncs
    collector: Collector
    eval_pipeline: Pipeline | None = None


def _open_folder(folder: Path, runtime: Runtime, stack: ExitStack) -> StopRequest:
    """Lock the run's folder, record failures and logs in it, and handle signals from here on."""
    stack.enter_context(locked_folder(folder, runtime))
    stack.enter_context(record_failure(folder, runtime))
    setup_logging(runtime.rank, folder)
    stop = StopRequest()
    stop_when_launcher_dies()
    stack.callback(stop.restore)
    return stop


def _load_data(config: Config) -> _Data:
    tokenizer = load_tokenizer(config.model)
    prompter = Prompter(config.prompts, tokenizer)
    limit = config.data.max_prompt_tokens
    train_problems = load_problems(config.data.train, prompter.search_prompt, limit)
    eval_problems: list[Problem] = []
    if config.data.eval:
        eval_problems = load_problems(config.data.eval, prompter.search_prompt, limit)
    _warn_of_overlap(train_problems, eval_problems)
    return _Data(tokenizer, prompter, train_problems, eval_problems)


def _find_checkpoint(
    folder: Path, config: Config, data: _Data, runtime: Runtime
) -> tuple[CheckpointManager, int | None]:
    """Return the checkpoints and the step to resume from.

    Without one, archive what earlier starts recorded.
    """
    checkpoints = CheckpointManager(folder / "checkpoints", config.checkpoint.keep_last)
    resume_from = find_resumable(
        checkpoints, config, fingerprint(data.train_problems), runtime.world_size
    )
    if resume_from is None and runtime.is_main:
        archive_previous(folder)
    return checkpoints, resume_from


def _make_telemetry(folder: Path, config: Config, runtime: Runtime) -> Telemetry:
    resolved = config.model_dump(mode="json")
    return Telemetry(
        folder, config.telemetry, config.run.steps, folder.name, resolved, enabled=runtime.is_main
    )


def _build_engines(
    config: Config,
    data: _Data,
    policies: dict[str, Policy],
    frozen: dict[str, FrozenPolicy],
    runtime: Runtime,
) -> tuple[Sampler, Syncs]:
    """Return the sampler, and the sync of each model's weights into its engine."""
    sampler, engines = build_engines(config, stop_ids(config.model, data.tokenizer), runtime)
    canary = data.prompter.search_prompt(data.train_problems[0])
    syncs = {}
    for name, policy in (policies | frozen).items():
        syncs[name] = WeightSync(
            policy, engines[name], canary, config, runtime, frozen=name in frozen
        )
    return sampler, Syncs(syncs)


def _build_rollout(
    config: Config,
    data: _Data,
    objective: Objective,
    sync: Syncs,
    make_pipeline: Callable[[SamplingPlan], Pipeline],
    sampler: ProblemSampler,
    runtime: Runtime,
) -> _Rollout:
    """Make the pipelines of training and of evaluation, and the collector. Collective."""
    training = make_pipeline(objective.plan)
    evaluation = None
    if data.eval_problems:
        evaluation = make_pipeline(SamplingPlan.for_evaluation(config.algorithm, objective.plan))
    collector: Collector = BatchCollector(
        data.train_problems, sampler, training, config.batch, config.run.seed
    )
    if config.rollout.record.write is not None:
        collector = Recorder(collector, config.rollout.record.write, runtime)
    return _Rollout(sync, collector, evaluation)


def _is_evaluated(folder: Path, step: int) -> bool:
    """Return whether the run's metrics hold an evaluation after `step` steps."""
    for record in read_metrics(folder):
        if record["step"] == step and any(name.startswith("eval/") for name in record):
            return True
    return False


def _warn_of_overlap(train: Sequence[Problem], held_out: Sequence[Problem]) -> None:
    known = {repr(problem.messages) for problem in train}
    if shared := sum(repr(problem.messages) in known for problem in held_out):
        log.warning("%d of %d evaluation problems are also trained on", shared, len(held_out))


def _set_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _get_rng() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }


def _set_rng(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
