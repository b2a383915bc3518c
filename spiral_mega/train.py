"""The training loop of SPIRAL.

One step, from a batch of problems to updated weights in the engine:

    collect -------> assign credit --> training sequences --> update -----> sync ----> log,
    episodes:        rewards become    weighted, packed       optimizer     weights    checkpoint
    traces, rewards  advantages        into micro-batches     steps         to engine

Credit is assigned to each episode as it completes, while the batch is being collected: dynamic
sampling has to know which episodes are effective. What follows sees traces with advantages, and no
sets. The batch is split by problem into `batch.minibatches` parts, and every model gets one
optimizer update from each part.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from spiral_mega.algorithm.regularizers import Regularizers
from spiral_mega.algorithm.weighting import (
    ComponentTotals,
    component_totals,
    scale_metrics,
    training_sequences,
)
from spiral_mega.config import Config
from spiral_mega.config.model_set import metric_key
from spiral_mega.distributed.collectives import max_over_ranks, sum_over_ranks
from spiral_mega.distributed.runtime import Runtime
from spiral_mega.evaluation.accuracy import measure_accuracy
from spiral_mega.packing.distribute import distribute
from spiral_mega.packing.packing_metrics import packing_metrics
from spiral_mega.packing.training_sequence import TrainingSequence
from spiral_mega.policy import Policy
from spiral_mega.policy.skipped_updates import SkippedUpdates
from spiral_mega.report.end_of_run import print_summary
from spiral_mega.rollout.batch import AssignCredit, Batch
from spiral_mega.rollout.batch_metrics import batch_metrics, check_mismatch, check_verifier
from spiral_mega.rollout.pipeline import Interrupted
from spiral_mega.run import Run, open_run
from spiral_mega.telemetry import memory_metrics
from spiral_mega.telemetry.combine import combine_updates
from spiral_mega.telemetry.trace_file import trace_path, write_traces
from spiral_mega.traces import Episode

log = logging.getLogger(__name__)

Metrics = dict[str, float]


def train(config: Config, runtime: Runtime) -> None:
    """Run or resume a training, until its last step or a request to stop. Collective."""
    with open_run(config, runtime) as run:
        step = saved = run.resume()
        run.sync()
        finished = False
        skipped_updates = SkippedUpdates(config.policy.max_skipped_updates)
        try:
            while not run.stop.on_any_rank():
                if run.evaluation_due(step):
                    run.telemetry.log(step, evaluate_held_out(run))
                finished = step >= config.run.steps
                if finished:
                    break
                metrics = train_step(run, step)
                step += 1
                run.telemetry.log(step, metrics)
                check_mismatch(metrics, config.rollout.sync)
                skipped_updates.check(metrics)
                if step % config.checkpoint.every == 0:
                    run.save(step)
                    saved = step
        except Interrupted:
            log.warning(
                "interrupted after step %d: unfinished episodes are discarded, and sampled again on resume",
                step,
            )
        if saved != step:
            run.save(step)
        run.checkpoints.wait()
        if finished and config.checkpoint.save_hf:
            for model, policy in run.models.items():
                policy.save_pretrained(run.folder / "model" / model)
        run.set_status("finished" if finished else "stopped", step)
    if runtime.is_main:
        print_summary(run.folder)


def train_step(run: Run, step: int) -> Metrics:
    """Train on the next batch after `step` completed steps; return its metrics. Collective.

    Raises Interrupted if the run was asked to stop while it sampled; its state is then that before
    the step.
    """
    with run.timer("step"):
        batch, metrics = collect(run, step, assign_credit=run.objective.assign_credit)
        metrics |= scale_metrics(run.weighting, run.objective)
        run.sync.release()  # the engine frees the device for the updates
        metrics |= update(run, batch)
        with run.timer("sync"):
            metrics |= run.sync()
        with run.timer("save_traces"):
            if run.config.telemetry.traces:
                write_traces(trace_path(run.folder, step + 1, run.runtime.rank), batch.sampled)
    times = max_over_ranks(run.timer.pop() | memory_metrics())
    tokens = metrics["rollout/response_tokens"] + metrics["rollout/prompt_tokens"]
    throughput = {"throughput/tokens_per_s": tokens / times["time/step"]}
    return metrics | times | throughput | {"data/epoch": run.sampler.epoch}


def collect(run: Run, step: int, assign_credit: AssignCredit) -> tuple[Batch, Metrics]:
    """Sample the batch of a step and assign credit; return the batch and its metrics."""
    sampler_state = run.sampler.state_dict()
    try:
        with run.timer("rollout"):
            batch = run.collector.collect(step, assign_credit)
            metrics = batch_metrics(batch)
            if metrics.get("verify/crash") and run.stop.on_any_rank():
                raise Interrupted  # the signal that stops this run may have ended the verifiers too
    except Interrupted:
        run.sampler.load_state_dict(sampler_state)
        raise
    check_verifier(metrics, run.config.rewards)
    return batch, metrics


def update(run: Run, batch: Batch) -> Metrics:
    """Update every model once from each minibatch; return the combined metrics."""
    updates: dict[str, list[Metrics]] = {model: [] for model in run.policies}
    for episodes in split_minibatches(batch, run.config.batch.minibatches):
        with run.timer("exchange"):
            sequences = weighted_sequences(run, episodes)
        for model, policy in run.policies.items():
            metrics = update_policy(run, policy, sequences[model])
            if metrics:
                updates[model].append(metrics)
    combined: Metrics = {}
    for model, of_model in updates.items():
        metrics = combine_updates(of_model) | {"optim/updates": float(len(of_model))}
        combined |= {metric_key(name, model): value for name, value in metrics.items()}
    return combined


def split_minibatches(batch: Batch, count: int) -> list[list[Episode]]:
    """Split the kept episodes by prompt index: the same parts on any number of ranks."""
    part_of = {index: position % count for position, index in enumerate(batch.kept_indices)}
    parts: list[list[Episode]] = [[] for _ in range(count)]
    for episode in batch.kept:
        parts[part_of[episode.index]].append(episode)
    return parts


def weighted_sequences(run: Run, episodes: Sequence[Episode]) -> dict[str, list[TrainingSequence]]:
    """Return this rank's training sequences by model, weighted over all ranks; collective."""
    totals = sum_totals(component_totals(episodes, run.objective.components))
    regularized = Regularizers.from_algorithm(run.config.algorithm).active
    return training_sequences(
        episodes, run.weighting, totals, run.models, include_ineffective=regularized
    )


def sum_totals(local: dict[str, ComponentTotals]) -> dict[str, ComponentTotals]:
    """Add each component's totals over all ranks; collective."""
    flat: Metrics = {}
    for component, totals in local.items():
        flat |= {f"{component}/{field}": count for field, count in totals._asdict().items()}
    summed = sum_over_ranks(flat)
    totals_of = {}
    for component in local:
        counts = {field: int(summed[f"{component}/{field}"]) for field in ComponentTotals._fields}
        totals_of[component] = ComponentTotals(**counts)
    return totals_of


def update_policy(run: Run, policy: Policy, sequences: list[TrainingSequence]) -> Metrics:
    """Make one update from the sequences of all ranks; no metrics without sequences."""
    budget = run.config.policy.microbatch_tokens
    with run.timer("exchange"):
        microbatches = distribute(sequences, budget, policy.replica)
        packing = packing_metrics(microbatches, budget)
    with run.timer("update"):
        return policy.update(microbatches) | packing if microbatches else {}


def evaluate_held_out(run: Run) -> Metrics:
    """Return the metrics of the held-out problems; collective."""
    assert run.eval_pipeline is not None  # a replay, without an engine, has no held-out problems
    repeats, seed = run.config.eval.repeats, run.config.run.seed
    with run.timer("eval"):
        metrics = measure_accuracy(run.eval_pipeline, run.eval_problems, repeats, seed)
    return metrics | run.timer.pop()
