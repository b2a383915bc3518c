"""`spiral-mega eval`: sample what the harnesses need, measure, analyse, and write it all down."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from spiral_mega.analysis import summarise
from spiral_mega.config import Config
from spiral_mega.config.model_set import model_configs
from spiral_mega.data.problems import fingerprint, load_problems
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import ConfigError
from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.evaluation.grading import grade
from spiral_mega.evaluation.harnesses.registry import Sampling, samplings
from spiral_mega.evaluation.results import results_json, results_table
from spiral_mega.evaluation.sampling import sample
from spiral_mega.evaluation.store import Store
from spiral_mega.evaluation.target import Target, find_target
from spiral_mega.models.tokenizer import load_tokenizer, stop_ids
from spiral_mega.process.stop_request import StopRequest
from spiral_mega.prompts.prompter import Prompter
from spiral_mega.rewards.verifier import make_verifier_pool
from spiral_mega.rollout import build_engines
from spiral_mega.rollout.pipeline import Interrupted, Pipeline
from spiral_mega.telemetry import atomic_path, setup_logging, write_json_atomic
from spiral_mega.telemetry.run_folder import locked_folder
from spiral_mega.traces import AGGREGATION, Problem
from spiral_mega.validation.load import dump_config, load_config
from spiral_mega.validation.models import check_models

log = logging.getLogger(__name__)

# What decides the traces: an evaluation goes on only where all of it is the same.
SAMPLED_BY = ("name", "tensor_parallel", "max_num_seqs")  # engine settings that decide what is sampled


def prepare(
    config_path: Path | None, model: str | None, output: Path | None, overrides: Sequence[str]
) -> tuple[Config, Target, Path]:
    """The configuration, what is evaluated, and the folder for it.

    Without a configuration a run's own is used; for another model the overrides are all there is. Raises ConfigError.
    """
    if config_path is None and model is None:
        raise ConfigError("nothing to evaluate: give a configuration, --model, or both")
    target = find_target(model) if model is not None else None
    values: dict[str, Any] = target.values() if target else {}
    if config_path is None and target is not None:
        config_path = target.run_config
    if config_path is None:  # no training is meant, so what it needs stands for itself
        values |= {
            "run": {"dir": str(output or "runs/eval"), "steps": 1},
            "data": {"train": "${data.eval}"},
            "policy": {"microbatch_tokens": "${rollout.sampling.max_context_tokens}"},
        }
    config = load_config(config_path, overrides, values)
    if target is not None and config.model.path != values["model"]["path"]:
        raise ConfigError(f"model.path={config.model.path} is given, and --model {model} too: leave one of them out")
    if not config.data.eval:
        raise ConfigError("data.eval is empty: name problems to evaluate, such as data.eval='[{path: aime25.parquet}]'")
    folder = Path(config.run.dir) / "evaluation"
    if target is not None and target.checkpoint is not None:
        folder = folder / target.checkpoint.name
    return config, target or Target(config.model.path), output or folder


def evaluate_model(config: Config, target: Target, folder: Path, runtime: Runtime) -> bool:
    """Run or go on with the evaluation in `folder`; whether it came to its end. Collective.

    What is measured goes to results.json and, as a table, to standard output; the analysis to analysis.json.
    """
    needed = samplings(config)
    store = Store(folder)
    with ExitStack() as stack:
        stack.enter_context(locked_folder(folder, runtime))
        setup_logging(runtime.rank, folder)
        stop = StopRequest()
        stack.callback(stop.restore)
        check_models(config)
        tokenizer = load_tokenizer(config.model)
        prompter = Prompter(config.prompts, tokenizer)
        problems = load_problems(config.data.eval, prompter.search_prompt, config.data.max_prompt_tokens)
        if runtime.is_main:
            store.claim(_identity(config, target, problems))
            with atomic_path(folder / "config.yaml") as path:
                path.write_text(dump_config(config))
        verifier = stack.enter_context(make_verifier_pool(config.rewards, problems))
        engine, engines = build_engines(config, stop_ids(config.model, tokenizer), runtime)
        stack.callback(engine.close)
        target.load(engines, config, runtime)
        try:
            for sampling in needed:
                pipeline = Pipeline(
                    engine, prompter, verifier, tokenizer, config.algorithm, config.rollout, stop, sampling.plan
                )
                sample(
                    sampling,
                    problems,
                    pipeline,
                    lambda episode, cuts=sampling.cuts: grade(episode, cuts, verifier, tokenizer),  # type: ignore[misc]
                    store,
                    runtime,
                    chunk=config.eval.chunk,
                    seed=config.run.seed,
                )
        except Interrupted:
            log.warning("interrupted: what was being sampled is given up; the same command goes on from the last chunk")
            return False
        if runtime.is_main:
            _conclude(config, needed, problems, store)
    return True


def _conclude(config: Config, needed: Sequence[Sampling], problems: Sequence[Problem], store: Store) -> None:
    """Measure and analyse what is in the store, and write both down."""
    chunks = range(-(-len(problems) // config.eval.chunk))
    measures, analyses = [], {}
    for sampling in needed:
        graded: list[GradedEpisode] = [each for chunk in chunks for each in store.read(sampling.name, chunk)]
        measures += [measure for of in sampling.measures for measure in of(graded)]
        analyses[sampling.name] = summarise([each.facts for each in graded], config.run.seed)
    results = results_json(measures, [problem.id for problem in problems], config.run.seed)
    write_json_atomic(store.folder / "results.json", results, indent=None)
    write_json_atomic(store.folder / "analysis.json", analyses)
    print(results_table(results))
    print(f"\n{len(problems)} problems: {store.folder / 'results.json'}")


def _identity(config: Config, target: Target, problems: Sequence[Problem]) -> dict[str, Any]:
    settings = config.model_dump(mode="json")
    phi = {}
    if config.two_models is not None:
        phi = {"aggregation": Target(model_configs(config)[AGGREGATION].model.path).identity()}
    return phi | {
        "model": target.identity(),
        "data": fingerprint(problems),
        "prompts": settings["prompts"],
        "engine": {key: settings["rollout"]["engine"][key] for key in SAMPLED_BY},
        "sampling": settings["rollout"]["sampling"],
        "set_order": config.algorithm.set_order,
        "param_dtype": config.policy.param_dtype,
        "seed": config.run.seed,
        "chunk": config.eval.chunk,
    }
