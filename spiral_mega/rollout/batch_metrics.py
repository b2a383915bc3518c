"""Metrics of a step's batch over all ranks, and the checks that stop a run on them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping

from spiral_mega.config import RewardsConfig, SyncConfig
from spiral_mega.distributed.collectives import sum_over_ranks
from spiral_mega.errors import UserError
from spiral_mega.rollout.batch import Batch
from spiral_mega.traces import Trace

log = logging.getLogger(__name__)


class MismatchError(UserError):
    """The log-probs of sampler and trainer differ by more than the run allows."""


class VerifierError(UserError):
    """More verifications failed than the run allows."""


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return the metrics of a step's batch, over all ranks; collective.

    Means by component are over every trace that was sampled, whether trained on or not.
    `entropy/*`, the mean of the negative log-probs of the sampled tokens, is an unbiased estimate
    of the sampler's token entropy.
    """
    local: Counter[str] = Counter()
    for episode in batch.sampled:
        for trace in episode.traces():
            local.update(_trace_sums(trace))
    sums = sum_over_ranks(dict(local))
    prompt_tokens = sums.get("prompt_tokens", 0.0)
    response_tokens = sum(value for name, value in sums.items() if name.startswith("tokens/"))
    metrics = {
        "batch/prompts_kept": float(len(batch.kept_indices)),
        "batch/prompts_sampled": float(batch.num_prompts),
        "batch/prompts_surplus": float(max(0, batch.num_effective - len(batch.kept_indices))),
        "batch/effective_share": batch.num_effective / batch.num_prompts,
        "batch/prompts_cancelled": float(batch.num_cancelled),
        "rollout/prompt_tokens": prompt_tokens,
        "rollout/prefix_cache_hit_rate": sums.get("cached_tokens", 0.0) / max(prompt_tokens, 1.0),
        "rollout/response_tokens": response_tokens,
    }
    for name, value in sums.items():
        if name.startswith("verify/"):
            metrics[name] = value
        elif name.startswith("traces/"):
            metrics |= _component_means(name.removeprefix("traces/"), sums)
    return metrics


def _trace_sums(trace: Trace) -> dict[str, float]:
    """Return what a trace adds to the sums that the metrics are made of."""
    component = trace.component
    finite_logprobs = [logprob for logprob in trace.logprobs if math.isfinite(logprob)]
    return {
        f"traces/{component}": 1.0,
        f"tokens/{component}": trace.length,
        f"reward/{component}": trace.reward,
        f"gated/{component}": trace.gated,
        f"truncated/{component}": trace.finish == "length",
        f"nll/{component}": -sum(finite_logprobs),
        f"finite/{component}": len(finite_logprobs),
        f"verify/{trace.verification}": 1.0,
        "prompt_tokens": len(trace.prompt_ids),
        "cached_tokens": trace.cached_tokens,
    }


def _component_means(component: str, sums: Mapping[str, float]) -> dict[str, float]:
    """Return a component's means per trace, and its entropy per token with a finite log-prob."""
    num_traces = sums[f"traces/{component}"]
    means = {}
    for name in ("reward", "gated", "truncated"):
        means[f"{name}/{component}"] = sums[f"{name}/{component}"] / num_traces
    means[f"length/{component}"] = sums[f"tokens/{component}"] / num_traces
    means[f"entropy/{component}"] = sums[f"nll/{component}"] / max(sums[f"finite/{component}"], 1.0)
    return means


def check_verifier(metrics: Mapping[str, float], rewards: RewardsConfig) -> None:
    """Raise VerifierError if more verifications failed than `rewards.max_failure_rate`."""
    counts = {
        name.removeprefix("verify/"): count
        for name, count in metrics.items()
        if name.startswith("verify/") and count
    }
    total = sum(counts.values())
    failed = total - counts.pop("ok", 0.0)
    if failed > rewards.max_failure_rate * total:
        by_status = ", ".join(f"{status} {count:.0f}" for status, count in sorted(counts.items()))
        raise VerifierError(
            f"{failed:.0f} of the step's {total:.0f} verifications failed ({by_status}), more than "
            f"rewards.max_failure_rate ({rewards.max_failure_rate}): logs/rank*.log has the "
            "reasons ('verification of a response'). Their zero rewards were not trained on; the "
            "run resumes from its last checkpoint"
        )


def check_mismatch(metrics: Mapping[str, float], sync: SyncConfig) -> None:
    """Warn, or raise MismatchError, if any model's sampler/kl exceeds `rollout.sync.max_kl`."""
    if sync.max_kl is None:
        return
    exceeded = [
        f"{name} is {kl:.3g}"
        for name, kl in metrics.items()
        if name.startswith("sampler/kl") and not kl <= sync.max_kl  # NaN exceeds too
    ]
    if not exceeded:
        return
    message = (
        f"{', '.join(exceeded)}, above rollout.sync.max_kl ({sync.max_kl}): the engine's log-probs "
        "are not those of the policy. Look for different kernels, precision or templates; "
        "algorithm.loss.name=truncated_importance_sampling and algorithm.max_sequence_ratio limit "
        "the effect"
    )
    if sync.on_max_kl == "stop":
        raise MismatchError(f"{message}. The run resumes from its last checkpoint")
    log.warning(message)
