"""What every policy makes of a micro-batch's log-probs: the weighted loss, and the sums behind the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from spiral_mega.algorithm.losses import LossFunction, LossInputs
from spiral_mega.algorithm.regularizers import Regularizers, kl_estimate
from spiral_mega.distributed.collectives import max_over_ranks, sum_over_ranks
from spiral_mega.packing.tree_batch import TreeBatch


@dataclass
class Totals:
    """Sums over the tokens trained on, this rank's; on the device until the end."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    peaks: list[torch.Tensor] = field(default_factory=list)

    def add(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            total = value.sum(dtype=torch.float64)
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def reduce(self) -> dict[str, float]:
        """The metrics, over all ranks and equal on them; collective."""
        sums = sum_over_ranks({name: float(value) for name, value in self.sums.items()})
        peak = max_over_ranks(
            {"log_ratio_abs": max((float(each) for each in self.peaks), default=0.0)}
        )
        tokens = max(sums.get("tokens", 0.0), 1.0)
        unmasked = max(tokens - sums.get("masked", 0.0), 1.0)
        of_reference = (
            {"kl/reference": sums["reference_kl"] / tokens} if "reference_kl" in sums else {}
        )
        return of_reference | {
            "train/loss": sums.get("loss", 0.0),
            "train/tokens": sums.get("tokens", 0.0),
            "train/clipped": sums.get("clipped", 0.0) / tokens,
            "entropy/trained": sums.get("entropy", 0.0) / tokens,
            "sampler/log_ratio_mean": sums.get("log_ratio", 0.0) / unmasked,
            # Unbiased for KL(sampler || trainer), and never negative: E[r - 1 - log r] under the
            # sampler.
            "sampler/kl": sums.get("kl", 0.0) / unmasked,
            "sampler/log_ratio_abs_max": peak["log_ratio_abs"],
            "sampler/masked_tokens": sums.get("masked", 0.0),
        }


def weighted_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: TreeBatch,
    loss_fn: LossFunction,
    totals: Totals,
    regularizers: Regularizers,
    reference_logprobs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over the R response tokens of weight * (token loss + what `regularizers` add), a scalar,
    counted in `totals`.

    `logprobs`, `entropy` [R]: of the response tokens, and where they are predicted.
    `reference_logprobs` [R]: the reference policy's, without gradient, where there is one.
    """
    advantages = regularizers.advantages(
        batch.advantages, logprobs, reference_logprobs, batch.sequence_ids
    )
    tokens = loss_fn(LossInputs(logprobs, batch.sampler_logprobs, advantages, batch.sequence_ids))
    losses = tokens.loss_R
    if (penalty := regularizers.penalty(logprobs, entropy, reference_logprobs)) is not None:
        losses = losses + penalty.masked_fill(tokens.masked_R, 0.0)
    weighted = losses * batch.weights
    with torch.no_grad():
        ratio = (logprobs - batch.sampler_logprobs)[~tokens.masked_R]
        totals.add(
            tokens=torch.ones_like(logprobs), loss=weighted, entropy=entropy, log_ratio=ratio,
            kl=ratio.exp() - 1 - ratio, clipped=tokens.clipped_R, masked=tokens.masked_R,
        )  # fmt: skip
        if reference_logprobs is not None:
            totals.add(reference_kl=kl_estimate(logprobs, reference_logprobs, "k3"))
        if ratio.numel():
            totals.peaks.append(ratio.abs().max())
    return weighted.sum()
