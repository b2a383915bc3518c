"""Compute the loss of each response token from its log-probabilities and its advantage.

A loss maps the `LossInputs` of a packed micro-batch to a `TokenLoss`, whose tokens the caller
multiplies by their weights and sums. With d = logp - logp_sampler and r = exp(d):

    loss                            of a token with advantage A (sg: no gradient)
    importance_sampling             -r A                                                  (the paper's)
    ppo_clip                        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    gspo                            as ppo_clip, with exp(mean of d over the sequence) in place of r
    cispo                           -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp
    truncated_importance_sampling   -sg(min(r, ratio_cap)) A logp

- A token whose sampler log-probability is not finite has no ratio. Its loss and gradient are 0, and
  it counts as `masked`. A policy log-probability that is not finite is a fault, and shows in the
  gradient.
- d is clamped to MAX_LOG_RATIO from above, so that no exponential overflows; there the gradient
  through r is 0, and the token counts as `clipped`. A very negative d needs no limit: r and its
  gradient go to 0.

Suffix _R: one value for each of the R response tokens of the micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from spiral_mega.config.schema import AlgorithmConfig

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The R response tokens of a packed micro-batch.

    Only `logprobs_R`, the policy's, carry a gradient. `sequence_ids_R` (long, in [0, R)) assign
    tokens to sequences; the others are float32 or wider. Raises ValueError unless all have the same
    shape [R].
    """

    logprobs_R: Tensor
    sampler_logprobs_R: Tensor
    advantages_R: Tensor
    sequence_ids_R: Tensor

    def __post_init__(self) -> None:
        tensors = (self.logprobs_R, self.sampler_logprobs_R, self.advantages_R, self.sequence_ids_R)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(shapes[0]) != 1 or len(set(shapes)) != 1:
            raise ValueError(
                "logprobs, sampler_logprobs, advantages and sequence_ids have shapes "
                f"{', '.join(map(str, shapes))}: each must be [R]"
            )


class TokenLoss(NamedTuple):
    """Loss of each token, and the masks of tokens where a limit on the ratio took effect and of those left out."""

    loss_R: Tensor
    clipped_R: Tensor
    masked_R: Tensor


LossFunction = Callable[[LossInputs], TokenLoss]


def make_loss(config: AlgorithmConfig) -> LossFunction:
    """Return the loss that `config.loss` names, with its limits bound, and with far sequences masked if configured."""
    limits = config.loss.model_dump(exclude={"name"})
    loss: LossFunction = partial(LOSSES[config.loss.name], **limits)
    if config.max_sequence_ratio is None:
        return loss
    return partial(mask_off_policy_sequences, loss=loss, max_ratio=config.max_sequence_ratio)


def mask_off_policy_sequences(
    inputs: LossInputs, *, loss: LossFunction, max_ratio: float
) -> TokenLoss:
    """Mask every token of sequences whose exp(mean of d) is outside [1 / max_ratio, max_ratio], and compute `loss`."""
    tokens = _mask_tokens(replace(inputs, logprobs_R=inputs.logprobs_R.detach()))
    far_R = _sequence_mean(tokens, inputs.sequence_ids_R).abs() > math.log(max_ratio)
    return loss(
        replace(inputs, sampler_logprobs_R=inputs.sampler_logprobs_R.masked_fill(far_R, -math.inf))
    )


def importance_sampling(inputs: LossInputs) -> TokenLoss:
    """-r A: the paper's."""
    tokens = _mask_tokens(inputs)
    ratio_R, overflowed_R = _ratio(tokens.log_ratio_R)
    return TokenLoss(-ratio_R * tokens.advantages_R, overflowed_R, tokens.masked_R)


def ppo_clip(inputs: LossInputs, *, clip_low: float, clip_high: float) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). `clipped`: the clip stops the gradient."""
    tokens = _mask_tokens(inputs)
    return _clipped_surrogate(tokens.log_ratio_R, tokens, clip_low, clip_high)


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> TokenLoss:
    """As `ppo_clip`, with the ratio exp(mean of d over the sequence) at each of the sequence's
    tokens.

    Masked tokens are left out of the mean. The sum over a sequence's L tokens is L times the
    sequence's own loss, so `loss_reduction: sequence_mean` gives GSPO's mean over sequences.
    """
    tokens = _mask_tokens(inputs)
    return _clipped_surrogate(
        _sequence_mean(tokens, inputs.sequence_ids_R), tokens, clip_low, clip_high
    )


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> TokenLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp: the clip limits a token's weight, never stops its gradient."""
    return _weighted_logprob(_mask_tokens(inputs), 1 - clip_low, 1 + clip_high)


def truncated_importance_sampling(inputs: LossInputs, *, ratio_cap: float) -> TokenLoss:
    """-sg(min(r, ratio_cap)) A logp."""
    return _weighted_logprob(_mask_tokens(inputs), 0.0, ratio_cap)


LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "importance_sampling": importance_sampling,
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "truncated_importance_sampling": truncated_importance_sampling,
}
"""By `algorithm.loss.name`. The keyword arguments of each are the other keys of its section."""


class _MaskedTokens(NamedTuple):
    """The inputs with logp = d = A = 0 at masked tokens, which keeps these out of every value and gradient."""

    logprobs_R: Tensor
    log_ratio_R: Tensor
    advantages_R: Tensor
    masked_R: Tensor


def _mask_tokens(inputs: LossInputs) -> _MaskedTokens:
    masked_R = ~torch.isfinite(inputs.sampler_logprobs_R)
    # Filled before any arithmetic: a mask on the result alone would let 0 * NaN into the gradient.
    logprobs_R = inputs.logprobs_R.masked_fill(masked_R, 0.0)
    log_ratio_R = logprobs_R - inputs.sampler_logprobs_R.masked_fill(masked_R, 0.0)
    return _MaskedTokens(
        logprobs_R, log_ratio_R, inputs.advantages_R.masked_fill(masked_R, 0.0), masked_R
    )


def _sequence_mean(tokens: _MaskedTokens, sequence_ids_R: Tensor) -> Tensor:
    """Return at each token the mean of d over its sequence [R], masked tokens left out."""
    kept_R = (~tokens.masked_R).to(tokens.log_ratio_R.dtype)
    # R slots suffice for any number of sequences; counting them would synchronize the device.
    total_R = torch.zeros_like(kept_R).index_add(0, sequence_ids_R, tokens.log_ratio_R)
    count_R = torch.zeros_like(kept_R).index_add(0, sequence_ids_R, kept_R)
    return (total_R / count_R.clamp(min=1))[sequence_ids_R]


def _ratio(log_ratio_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return r [R], and where d was above MAX_LOG_RATIO."""
    return log_ratio_R.clamp(max=MAX_LOG_RATIO).exp(), log_ratio_R > MAX_LOG_RATIO


def _clipped_surrogate(
    log_ratio_R: Tensor, tokens: _MaskedTokens, clip_low: float, clip_high: float
) -> TokenLoss:
    ratio_R, overflowed_R = _ratio(log_ratio_R)
    advantages_R = tokens.advantages_R
    clipped_ratio_R = ratio_R.clamp(1 - clip_low, 1 + clip_high)
    loss_R = -torch.minimum(ratio_R * advantages_R, clipped_ratio_R * advantages_R)
    above_R = (ratio_R > 1 + clip_high) & (advantages_R > 0)
    below_R = (ratio_R < 1 - clip_low) & (advantages_R < 0)
    clipped_R = above_R | below_R | (overflowed_R & ~tokens.masked_R)
    return TokenLoss(loss_R, clipped_R, tokens.masked_R)


def _weighted_logprob(tokens: _MaskedTokens, min_ratio: float, max_ratio: float) -> TokenLoss:
    ratio_R, overflowed_R = _ratio(tokens.log_ratio_R.detach())
    loss_R = -ratio_R.clamp(min_ratio, max_ratio) * tokens.advantages_R * tokens.logprobs_R
    outside_R = (ratio_R < min_ratio) | (ratio_R > max_ratio) | overflowed_R
    return TokenLoss(loss_R, outside_R & ~tokens.masked_R, tokens.masked_R)
