"""What a step's episodes look like in numbers, over all ranks."""

from __future__ import annotations

import logging
import math
from collections import Counter

from spiral_mega.config import RewardsConfig, SyncConfig
from spiral_mega.distributed.collectives import sum_over_ranks
from spiral_mega.errors import UserError
from spiral_mega.rollout.batch import Batch

log = logging.getLogger(__name__)


class MismatchError(UserError):
    """Sampler and trainer are further apart than the run allows."""


class VerifierError(UserError):
    """More verifications failed than the run allows."""


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Means over every trace sampled for the step, by component; collective.

    `entropy/*` is -mean log-prob of the sampled tokens: an unbiased estimate of the sampler's token entropy over
    all traces, whether trained on or not.
    """
    sums: Counter[str] = Counter()
    for episode in batch.sampled:
        for trace in episode.traces():
            finite = [p for p in trace.logprobs if math.isfinite(p)]
            sums.update(
                {
                    f"traces/{trace.component}": 1.0,
                    f"tokens/{trace.component}": trace.length,
                    f"reward/{trace.component}": trace.reward,
                    f"gated/{trace.component}": trace.gated,
                    f"truncated/{trace.component}": trace.finish == "length",
                    f"nll/{trace.component}": -sum(finite),
                    f"finite/{trace.component}": len(finite),
                    f"verify/{trace.verification}": 1.0,
                    "prompt_tokens": len(trace.prompt_ids),
                    "cached_tokens": trace.cached_tokens,
                }
            )
    total = sum_over_ranks(dict(sums))
    metrics = {
        "batch/problems": float(len(batch.kept_indices)),
        "batch/draws": float(batch.num_prompts),
        "batch/surplus": float(max(0, batch.num_effective - len(batch.kept_indices))),
        "effective/share": batch.num_effective / batch.num_prompts,
        "batch/cancelled": float(batch.num_cancelled),
        "rollout/prompt_tokens": total.get("prompt_tokens", 0.0),
        "rollout/cached_share": total.get("cached_tokens", 0.0) / max(total.get("prompt_tokens", 0.0), 1.0),
        "rollout/response_tokens": sum(value for name, value in total.items() if name.startswith("tokens/")),
    }
    for name, count in total.items():
        kind, _, component = name.partition("/")
        if kind == "verify":
            metrics[name] = count
        elif kind == "traces":
            for mean in ("reward", "gated", "truncated"):
                metrics[f"{mean}/{component}"] = total[f"{mean}/{component}"] / count
            metrics[f"length/{component}"] = total[f"tokens/{component}"] / count
            metrics[f"entropy/{component}"] = total[f"nll/{component}"] / max(total[f"finite/{component}"], 1.0)
    return metrics


def check_verifier(metrics: dict[str, float], rewards: RewardsConfig) -> None:
    """Raise VerifierError when more of the step's verifications failed than `rewards.max_failure_rate`."""
    counts = {name.removeprefix("verify/"): n for name, n in metrics.items() if name.startswith("verify/") and n}
    total = sum(counts.values())
    failed = total - counts.pop("ok", 0.0)
    if failed > rewards.max_failure_rate * total:
        ways = ", ".join(f"{name} {count:.0f}" for name, count in sorted(counts.items()))
        raise VerifierError(
            f"{failed:.0f} of the step's {total:.0f} verifications failed ({ways}), more than rewards.max_failure_rate "
            f"({rewards.max_failure_rate}): logs/rank*.log says why ('verification of a response'). Nothing was trained "
            "on their zeros; the run goes on from its last checkpoint"
        )


def check_mismatch(metrics: dict[str, float], sync: SyncConfig) -> None:
    """Warn, or raise MismatchError, when the step's sampler/kl, of any model, passed `rollout.sync.max_kl`."""
    if (bound := sync.max_kl) is None:
        return
    found = {name: kl for name, kl in metrics.items() if name.startswith("sampler/kl")}
    over = [f"{name} is {kl:.3g}" for name, kl in found.items() if not kl <= bound]
    if not over:
        return
    message = (
        f"{', '.join(over)}, above rollout.sync.max_kl ({sync.max_kl}): the engine's log-probs are not those of the "
        "policy. Look for other kernels, precision or templates; algorithm.loss=truncated_importance_sampling and "
        "algorithm.max_sequence_ratio limit what it does"
    )
    if sync.on_max_kl == "stop":
        raise MismatchError(f"{message}. The run goes on from its last checkpoint")
    log.warning(message)
