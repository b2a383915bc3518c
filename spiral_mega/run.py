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
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from spiral_mega.algorithm.objectives import Objective, make_objective
from spiral_mega.algorithm.plan import Plan
from spiral_mega.algorithm.weighting import Weighting, make_weighting
from spiral_mega.checkpoint.manager import CheckpointManager
from spiral_mega.checkpoint.policies import load_policies, policy_states
from spiral_mega.checkpoint.resume import find_resumable
from spiral_mega.config import Config, DataSource, ModelConfig
from spiral_mega.config.load import dump_config
from spiral_mega.config.models import model_configs
from spiral_mega.data.errors import DataError
from spiral_mega.data.filters import fit_prompts
from spiral_mega.data.problems import fingerprint, load_sources
from spiral_mega.data.sampler import ProblemSampler
from spiral_mega.distributed import gather_objects
from spiral_mega.errors import ConfigError
from spiral_mega.plan.model import check_dimensions
from spiral_mega.policy import FrozenPolicy, Policy, build_policies, check_policy
from spiral_mega.policy.model_config import read_model_config
from spiral_mega.prompts import Prompter
from spiral_mega.rewards import Verifier, check_kind
from spiral_mega.rollout import build_engines
from spiral_mega.rollout.batch import BatchCollector
from spiral_mega.rollout.pipeline import Pipeline
from spiral_mega.rollout.recording import Collector, Recorder, Replayer
from spiral_mega.rollout.sync import Syncs, WeightSync
from spiral_mega.run_folder import failure_told, locked_folder, set_aside, set_status
from spiral_mega.runtime import Runtime
from spiral_mega.signals import StopRequest, stop_with_launcher
from spiral_mega.telemetry import StageTimer, Telemetry, atomic_path, read_metrics, setup_logging
from spiral_mega.telemetry.trace_writer import remove_traces
from spiral_mega.traces import Problem
from spiral_mega.watchdog import watched

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
        stack.enter_context(failure_told(folder, runtime))
        setup_logging(runtime.rank, folder)
        stop = StopRequest()
        stop_with_launcher()
        stack.callback(stop.restore)
        _set_seed(config.run.seed)
        objective = make_objective(config.algorithm, config.frozen)
        check_context(config)
        check_policy(config, runtime.world_size)
        tokenizer = load_tokenizer(config.model)
        prompter = Prompter(config.prompts, tokenizer)
        train_problems = load_problems_for(config, prompter, config.data.train)
        eval_problems = load_problems_for(config, prompter, config.data.eval) if config.data.eval else []
        _warn_of_overlap(train_problems, eval_problems)
        checkpoints = CheckpointManager(folder / "checkpoints", config.checkpoint.keep_last)
        resume_from = find_resumable(checkpoints, config, fingerprint(train_problems), runtime.world_size)
        if resume_from is None and runtime.is_main:
            set_aside(folder)
        verifier = stack.enter_context(make_verifier(config, [*train_problems, *eval_problems]))
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
        if config.rollout.replay is not None:
            steps = range(resume_from or 0, config.run.steps)
            collector = Replayer(config.rollout.replay, steps, objective, runtime)
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
                pipeline = make_pipeline(Plan.of_evaluation(config.algorithm, objective.plan))
            collector = BatchCollector(train_problems, sampler, training, objective, config.batch, config.run.seed)
            if config.rollout.record is not None:
                collector = Recorder(collector, config.rollout.record, runtime)
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


def check_context(config: Config) -> None:
    """That each model exists, is the one that was planned with, and is made for rollout.max_context_tokens.

    Of two, also that they have the same tokens, since the one reads what the other wrote.
    """
    for each in model_configs(config).values():
        model = read_model_config(each.model.path)
        check_dimensions(each.model.dimensions or {}, model, each.model.path)
        limit = getattr(model, "max_position_embeddings", None)
        if limit is not None and config.rollout.max_context_tokens > limit:
            raise ConfigError(
                f"rollout.max_context_tokens is {config.rollout.max_context_tokens}, but the model at "
                f"{each.model.path} is made for {limit} positions: lower it"
            )
    if config.two_models is not None and (phi := config.two_models.aggregation_model) is not None:
        theirs = [_tokens(model) for model in (config.model, phi)]
        if theirs[0] != theirs[1]:
            raise ConfigError(
                f"two_models.aggregation_model.path {phi.path} has other tokens than model.path {config.model.path}: "
                "the one reads what the other wrote, so name models of the same tokenizer and vocabulary"
            )


def _tokens(model: ModelConfig) -> tuple[int, dict[str, int]]:
    """The size of the model's vocabulary, and its tokens by name."""
    vocabulary: int = read_model_config(model.path).get_text_config().vocab_size
    return vocabulary, load_tokenizer(model).get_vocab()


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model; an error that names the folder when there is none."""
    path = model.tokenizer or model.path
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # files of the wrong form fail in many ways
        raise ConfigError(f"model.tokenizer / model.path {path!r} does not load as a tokenizer: {error}") from error


def stop_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a response: those of the generation config, else the model's config, and the tokenizer's.

    Raises ConfigError if there are none, if one is no token of the model, or if the generation config is unreadable.
    """
    config = AutoConfig.from_pretrained(model.path)
    declared: Any = config.eos_token_id
    folder = Path(model.path)
    if not folder.is_dir() or (folder / "generation_config.json").exists():
        try:
            declared = GenerationConfig.from_pretrained(model.path).eos_token_id or declared
        except Exception as error:
            if folder.is_dir():
                raise ConfigError(f"{folder / 'generation_config.json'} cannot be read: {error}") from error
    ids = [*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id]
    ids = [token for token in ids if token is not None]
    vocabulary = config.get_text_config().vocab_size
    if not ids:
        raise ConfigError(f"model.path {model.path!r} names no end token (generation_config.json, tokenizer): add one")
    if strange := [token for token in ids if not (isinstance(token, int) and 0 <= token < vocabulary)]:
        raise ConfigError(f"model.path {model.path!r} names end tokens {strange}, but has tokens 0 to {vocabulary - 1}")
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens and the model at {model.path} only {vocabulary}: "
            "they do not belong together; check model.tokenizer"
        )
    return frozenset(ids)


def load_problems_for(config: Config, prompter: Prompter, sources: Sequence[DataSource]) -> list[Problem]:
    """The problems of `sources` whose prompt fits, with their verifiers checked."""
    problems = load_sources(sources)
    for kind, problem in {problem.kind: problem for problem in problems}.items():
        try:
            check_kind(kind)
        except ValueError as error:
            raise DataError(f"problem {problem.id!r} of {problem.source}: {error}") from error
    kept, _ = fit_prompts(problems, prompter.search_prompt, config.data.max_prompt_tokens)
    return kept


def make_verifier(config: Config, problems: Sequence[Problem]) -> Verifier:
    """The verifier processes, with all that these problems need loaded before any limit runs."""
    kinds = sorted({problem.kind for problem in problems})
    return Verifier(config.rewards.time_limit_s, config.rewards.workers, kinds)


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
