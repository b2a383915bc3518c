"""`spiral-mega eval`: sample what the harnesses need, and save their measures and the analysis.

prepare         find configuration, model and folder
evaluate_model  plan_samplings -> sample (resumable, in chunks) -> measure   -> results.json
                                                                -> aggregate -> analysis.json
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from spiral_mega import analysis
from spiral_mega.config import Config
from spiral_mega.config.model_set import model_configs
from spiral_mega.data.problems import fingerprint, load_problems
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.errors import ConfigError
from spiral_mega.evaluation.chunked_sampling import Sampling, plan_samplings, sample
from spiral_mega.evaluation.graded_episode import GradedEpisode
from spiral_mega.evaluation.grading import grade
from spiral_mega.evaluation.harnesses.harness import Measure
from spiral_mega.evaluation.model_source import ModelSource, find_source
from spiral_mega.evaluation.results import results_json, results_table
from spiral_mega.evaluation.store import Store
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

SAMPLING_ENGINE_KEYS = ("name", "tensor_parallel", "max_num_seqs")
"""Settings of rollout.engine that decide which traces are sampled."""


class Evaluation(NamedTuple):
    """What to evaluate, and the folder to write to."""

    config: Config
    source: ModelSource
    folder: Path


def prepare(
    config_path: Path | None, model: str | None, output: Path | None, overrides: Sequence[str]
) -> Evaluation:
    """Load the configuration, and find the model and the output folder. Raises ConfigError.

    Without `config_path`, a run's model uses the run's configuration, and any other model the
    overrides alone.
    """
    if config_path is None and model is None:
        raise ConfigError("nothing to evaluate: give a configuration, --model, or both")
    source = find_source(model, load_config) if model is not None else None
    values = source.required_values() if source is not None else {}
    if config_path is None and source is not None:
        config_path = source.run_config
    if config_path is None:  # nothing is trained: fill in what training requires
        values |= {
            "run": {"dir": str(output or "runs/eval"), "steps": 1},
            "data": {"train": "${data.eval}"},
            "policy": {"microbatch_tokens": "${rollout.sampling.max_context_tokens}"},
        }
    config = load_config(config_path, overrides, values)
    if source is not None and config.model.path != values["model"]["path"]:
        raise ConfigError(
            f"model.path={config.model.path} is given, and --model {model} too: leave one of them out"
        )
    if not config.data.eval:
        raise ConfigError(
            "data.eval is empty: name problems to evaluate, such as data.eval='[{path: aime25.parquet}]'"
        )
    folder = Path(config.run.dir) / "evaluation"
    if source is not None and source.checkpoint is not None:
        folder = folder / source.checkpoint.folder.name
    return Evaluation(config, source or ModelSource(config.model.path), output or folder)


def evaluate_model(config: Config, source: ModelSource, folder: Path, runtime: Runtime) -> bool:
    """Run the evaluation in `folder`, or resume it; return whether it was completed. Collective.

    Write the measures to results.json and, as a table, to standard output; write the analysis to
    analysis.json.
    """
    samplings = plan_samplings(config)
    store = Store(folder)
    with ExitStack() as stack:
        stack.enter_context(locked_folder(folder, runtime))
        setup_logging(runtime.rank, folder)
        stop = StopRequest()
        stack.callback(stop.restore)
        check_models(config)
        tokenizer = load_tokenizer(config.model)
        prompter = Prompter(config.prompts, tokenizer)
        problems = load_problems(
            config.data.eval, prompter.search_prompt, config.data.max_prompt_tokens
        )
        if runtime.is_main:
            store.claim(_identity(config, source, problems))
            with atomic_path(folder / "config.yaml") as path:
                path.write_text(dump_config(config))
        verifier = stack.enter_context(make_verifier_pool(config.rewards, problems))
        engine, engines = build_engines(config, stop_ids(config.model, tokenizer), runtime)
        stack.callback(engine.close)
        source.load_weights(engines, config, runtime)
        try:
            for sampling in samplings:
                pipeline = Pipeline(
                    engine,
                    prompter,
                    verifier,
                    tokenizer,
                    config.algorithm,
                    config.rollout,
                    stop,
                    sampling.plan,
                )
                sample(
                    sampling,
                    problems,
                    pipeline,
                    partial(
                        grade,
                        token_budgets=sampling.token_budgets,
                        verifier=verifier,
                        tokenizer=tokenizer,
                    ),
                    store,
                    runtime,
                    chunk=config.eval.chunk,
                    seed=config.run.seed,
                )
        except Interrupted:
            log.warning(
                "interrupted: the unfinished chunk is discarded; the same command resumes after the last one"
            )
            return False
        if runtime.is_main:
            _write_results(config, samplings, problems, store)
    return True


def _write_results(
    config: Config, samplings: Sequence[Sampling], problems: Sequence[Problem], store: Store
) -> None:
    """Compute measures and analysis from the stored records, and write both as JSON."""
    chunks = range(-(-len(problems) // config.eval.chunk))
    measures: list[Measure] = []
    analyses = {}
    for sampling in samplings:
        graded: list[GradedEpisode] = []
        for chunk in chunks:
            graded += store.read(sampling.name, chunk)
        for harness in sampling.harnesses:
            measures += harness.measure(graded, config.rollout.sampling.max_response_tokens)
        analyses[sampling.name] = analysis.aggregate(
            [each.stats for each in graded], config.run.seed
        )
    results = results_json(measures, [problem.id for problem in problems], config.run.seed)
    write_json_atomic(store.folder / "results.json", results, indent=None)
    write_json_atomic(store.folder / "analysis.json", analyses)
    print(results_table(results))
    print(f"\n{len(problems)} problems: {store.folder / 'results.json'}")


def _identity(config: Config, source: ModelSource, problems: Sequence[Problem]) -> dict[str, Any]:
    """Return everything that decides the traces: an evaluation resumes only if all of it is equal."""
    settings = config.model_dump(mode="json")
    engine = {key: settings["rollout"]["engine"][key] for key in SAMPLING_ENGINE_KEYS}
    identity = {}
    if config.two_models is not None:
        aggregation = model_configs(config)[AGGREGATION]
        identity["aggregation"] = ModelSource(aggregation.model.path).identity()
    return identity | {
        "model": source.identity(),
        "data": fingerprint(problems),
        "prompts": settings["prompts"],
        "rollout": {"engine": engine, "sampling": settings["rollout"]["sampling"]},
        "set_order": config.algorithm.set_order,
        "param_dtype": config.policy.param_dtype,
        "seed": config.run.seed,
        "chunk": config.eval.chunk,
    }
