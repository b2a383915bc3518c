"""The loop. One step: collect -> weigh -> update -> weights into the engine -> log -> checkpoint."""

from __future__ import annotations

import logging

from spiral_mega.algorithm.regularizers import Regularizers
from spiral_mega.algorithm.weighting import ComponentTotals, component_totals, scale_metrics
from spiral_mega.config import Config
from spiral_mega.config.model_set import metric_key, model_for
from spiral_mega.distributed.collectives import max_over_ranks, sum_over_ranks
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.evaluation.accuracy import measure_accuracy
from spiral_mega.packing.distribute import distribute
from spiral_mega.packing.packing_metrics import packing_metrics
from spiral_mega.packing.training_sequence import SequenceKey, TrainingSequence
from spiral_mega.policy.skipped_updates import SkippedUpdates
from spiral_mega.report.end_of_run import print_summary
from spiral_mega.rollout.batch import Batch
from spiral_mega.rollout.batch_metrics import batch_metrics, check_mismatch, check_verifier
from spiral_mega.rollout.pipeline import Interrupted
from spiral_mega.run import Run, open_run
from spiral_mega.telemetry import memory_metrics
from spiral_mega.telemetry.trace_file import trace_path, write_traces
from spiral_mega.traces import Episode

log = logging.getLogger(__name__)

COUNTS = ("train/tokens", "optim/microbatches", "optim/skipped", "sampler/masked_tokens")


def train(config: Config, runtime: Runtime) -> None:
    """Run or resume the training that `config` describes, to its last step or until it is asked to stop."""
    with open_run(config, runtime) as run:
        step = saved = run.resume()
        run.sync()
        finished = False
        skipped = SkippedUpdates(config.policy.max_skipped_updates)
        try:
            while not run.stop.on_any_rank():
                if run.evaluation_due(step):
                    run.telemetry.log(step, _evaluate(run))
                if finished := step >= config.run.steps:
                    break
                metrics = train_step(run, step)
                step += 1
                run.telemetry.log(step, metrics)
                check_mismatch(metrics, config.rollout.sync)
                skipped.check(metrics)
                if step % config.checkpoint.every == 0:
                    run.save(saved := step)
        except Interrupted:
            log.warning("interrupted after step %d: what was being sampled is given up, and done again on resume", step)
        if saved != step:
            run.save(step)
        run.checkpoints.wait()
        if finished and config.checkpoint.save_hf:
            for model, policy in run.models.items():
                policy.save_pretrained(run.folder / "model" / model)
        run.set_status("finished" if finished else "stopped", step)
    if runtime.is_main:
        print_summary(run.folder)


def train_step(run: Run, step: int) -> dict[str, float]:
    """One step of the algorithm, from `step` updates to the next; its metrics. Raises Interrupted, state as before."""
    config, timer = run.config, run.timer
    sampler_before = run.sampler.state_dict()
    with timer("step"):
        try:
            with timer("rollout"):
                batch = run.collector.collect(step)
                metrics = batch_metrics(batch)
                if metrics.get("verify/crash") and run.stop.on_any_rank():
                    raise Interrupted  # what stops this run may have ended the verifiers too
        except Interrupted:
            run.sampler.load_state_dict(sampler_before)
            raise
        check_verifier(metrics, config.rewards)
        metrics |= scale_metrics(run.weighting, run.objective)
        run.sync.release()
        updates: dict[str, list[dict[str, float]]] = {model: [] for model in run.policies}
        for part in _minibatches(batch, config.batch.minibatches):
            with timer("exchange"):
                by_model = _sequences(run, part)
            for model, sequences in by_model.items():
                policy = run.policies[model]
                with timer("exchange"):
                    microbatches = distribute(sequences, config.policy.microbatch_tokens, policy.replica)
                    packing = packing_metrics(microbatches, config.policy.microbatch_tokens)
                with timer("update"):
                    if microbatches:
                        updates[model].append(policy.update(microbatches) | packing)
        for model, of_model in updates.items():
            combined = _combine(of_model) | {"optim/updates": float(len(of_model))}
            metrics |= {metric_key(name, model): value for name, value in combined.items()}
        with timer("sync"):
            metrics |= run.sync()
        with timer("save_traces"):
            if config.telemetry.traces:
                write_traces(trace_path(run.folder, step + 1, run.runtime.rank), batch.sampled)
    times = max_over_ranks(timer.pop() | memory_metrics())
    tokens = metrics["rollout/response_tokens"] + metrics["rollout/prompt_tokens"]
    return metrics | times | {"throughput/tokens_per_s": tokens / times["time/step"], "data/epoch": run.sampler.epoch}


def _minibatches(batch: Batch, count: int) -> list[list[Episode]]:
    """Split the kept episodes into `count` parts by prompt index, the same parts on any number of ranks."""
    part_of = {index: position % count for position, index in enumerate(batch.kept_indices)}
    parts: list[list[Episode]] = [[] for _ in range(count)]
    for episode in batch.kept:
        parts[part_of[episode.index]].append(episode)
    return parts


def _sequences(run: Run, kept: list[Episode]) -> dict[str, list[TrainingSequence]]:
    """By the model that wrote them, this rank's traces with a gradient, weighted by the denominators of all ranks;
    collective."""
    local = component_totals(kept, run.objective.components)
    totals = _sum_totals(local)
    all_traces = Regularizers.of(run.config.algorithm).active
    sequences: dict[str, list[TrainingSequence]] = {model: [] for model in run.policies}
    models = run.models
    for episode in kept:
        for position, trace in enumerate(episode.traces()):
            if trace.component not in totals or not (trace.effective or all_traces) or not trace.response_ids:
                continue
            sequence = TrainingSequence(
                key=SequenceKey(episode.index, position),
                prompt_ids=trace.prompt_ids,
                response_ids=trace.response_ids,
                sampler_logprobs=trace.logprobs,
                advantage=trace.advantage,
                weight=run.weighting.trace_weight(trace, totals),
                observation_spans=tuple(trace.observation_spans),
            )
            sequences[model_for(trace.component, models)].append(sequence)
    return sequences


def _combine(updates: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step's updates as one: counts add up, maxima stay maxima, the rest are means."""
    combined = {}
    for name in updates[0] if updates else ():
        values = [update[name] for update in updates]
        if name.endswith("_max"):
            combined[name] = max(values)
        else:
            combined[name] = sum(values) / (1 if name in COUNTS else len(values))
    return combined


def _sum_totals(local: dict[str, ComponentTotals]) -> dict[str, ComponentTotals]:
    flat = {f"{name}/{field}": count for name, each in local.items() for field, count in each._asdict().items()}
    total = sum_over_ranks(flat)
    return {
        name: ComponentTotals(**{field: int(total[f"{name}/{field}"]) for field in ComponentTotals._fields})
        for name in local
    }


def _evaluate(run: Run) -> dict[str, float]:
    assert run.pipeline is not None  # the configuration refuses held-out problems where there is no engine
    with run.timer("eval"):
        metrics = measure_accuracy(run.pipeline, run.eval_problems, run.config.eval.repeats, run.config.run.seed)
    return metrics | run.timer.pop()
