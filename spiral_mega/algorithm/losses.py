"""The loss of a token, from its log-probabilities and its advantage.

Each loss takes one packed micro-batch of T response tokens: `logprobs` [T] of the policy (with gradient), and, without,
`sampler_logprobs` [T], `advantages` [T] and `sequence_ids` [T] (long, in [0, T)); all but `sequence_ids` in float32
or wider. The result is per token, to be multiplied by the tokens' weights and summed. With d = logp - logp_sampler and
r = exp(d):

- A token whose sampler log-probability is not finite has no ratio: its loss and its gradient are 0, and it is
  counted in `masked`. A policy log-probability that is not finite is a fault, and shows as such in the gradient.
- d is limited to MAX_LOG_RATIO from above, where the gradient through r becomes 0, so that no exponential overflows.
  Such tokens count as `clipped`. A very negative d needs no limit: r and its gradient go to 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from spiral_mega.config.schema import AlgorithmConfig

MAX_LOG_RATIO = 20.0


class TokenLoss(NamedTuple):
    """`loss` [T]; `clipped` [T], where a limit on the ratio took effect; `masked` [T], tokens left out of the loss."""

    loss: Tensor
    clipped: Tensor
    masked: Tensor


LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor], TokenLoss]


def make_loss(config: AlgorithmConfig) -> LossFunction:
    """The loss that `config.loss` names, with its limits bound."""
    low, high = config.clip_low, config.clip_high
    losses: dict[str, LossFunction] = {
        "importance_sampling": importance_sampling,
        "ppo_clip": partial(ppo_clip, clip_low=low, clip_high=high),
        "cispo": partial(cispo, clip_low=low, clip_high=high),
        "gspo": partial(gspo, clip_low=low, clip_high=high),
        "truncated_importance_sampling": partial(truncated_importance_sampling, ratio_cap=config.ratio_cap),
    }
    loss = losses[config.loss]
    if config.max_sequence_ratio is None:
        return loss
    return partial(mask_off_policy_sequences, loss=loss, max_ratio=config.max_sequence_ratio)


def mask_off_policy_sequences(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    loss: LossFunction,
    max_ratio: float,
) -> TokenLoss:
    """`loss`, with all tokens masked of a sequence whose exp(mean of d) is outside [1 / max_ratio, max_ratio]."""
    tokens = _tokens(logprobs.detach(), sampler_logprobs, advantages, sequence_ids)
    far = _sequence_mean(tokens, sequence_ids).abs() > math.log(max_ratio)
    return loss(logprobs, sampler_logprobs.masked_fill(far, -math.inf), advantages, sequence_ids)


def importance_sampling(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, sequence_ids: Tensor
) -> TokenLoss:
    """-r A: the paper's."""
    tokens = _tokens(logprobs, sampler_logprobs, advantages, sequence_ids)
    ratio, overflowed = _ratio(tokens.log_ratio)
    return TokenLoss(-ratio * tokens.advantages, overflowed, tokens.masked)


def ppo_clip(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). `clipped`: the clip stops the gradient."""
    tokens = _tokens(logprobs, sampler_logprobs, advantages, sequence_ids)
    return _clipped_surrogate(tokens.log_ratio, tokens, clip_low, clip_high)


def gspo(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """As `ppo_clip`, with the ratio s = exp(mean of d over the sequence) at each of the sequence's tokens.

    Masked tokens are left out of the mean. The sum of a sequence's L tokens is L times the sequence's own loss, so
    that `loss_reduction: sequence_mean` gives GSPO's mean over sequences.
    """
    tokens = _tokens(logprobs, sampler_logprobs, advantages, sequence_ids)
    return _clipped_surrogate(_sequence_mean(tokens, sequence_ids), tokens, clip_low, clip_high)


def cispo(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp: the clip limits a token's weight, never its gradient."""
    tokens = _tokens(logprobs, sampler_logprobs, advantages, sequence_ids)
    return _weighted_logprob(tokens, 1 - clip_low, 1 + clip_high)


def truncated_importance_sampling(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, sequence_ids: Tensor, *, ratio_cap: float
) -> TokenLoss:
    """-sg(min(r, ratio_cap)) A logp."""
    tokens = _tokens(logprobs, sampler_logprobs, advantages, sequence_ids)
    return _weighted_logprob(tokens, 0.0, ratio_cap)


class _Tokens(NamedTuple):
    """The inputs with masked tokens at logp = d = A = 0, which keeps them out of every value and gradient."""

    logprobs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    masked: Tensor


def _tokens(logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, sequence_ids: Tensor) -> _Tokens:
    shapes = [tuple(given.shape) for given in (logprobs, sampler_logprobs, advantages, sequence_ids)]
    if logprobs.dim() != 1 or len(set(shapes)) != 1:
        raise ValueError(
            "logprobs, sampler_logprobs, advantages and sequence_ids have shapes "
            f"{', '.join(map(str, shapes))}: each must be [T]"
        )
    masked = ~torch.isfinite(sampler_logprobs)
    # Filled before any arithmetic: a mask on the result alone would let 0 * NaN into the gradient.
    policy = logprobs.masked_fill(masked, 0.0)
    log_ratio = policy - sampler_logprobs.masked_fill(masked, 0.0)
    return _Tokens(policy, log_ratio, advantages.masked_fill(masked, 0.0), masked)


def _sequence_mean(tokens: _Tokens, sequence_ids: Tensor) -> Tensor:
    """At each token the mean of d over its sequence [T], masked tokens left out."""
    kept = (~tokens.masked).to(tokens.log_ratio.dtype)
    # One slot a token is room for any number of sequences, and spares the device a synchronization to count them.
    total = torch.zeros_like(kept).index_add(0, sequence_ids, tokens.log_ratio)
    count = torch.zeros_like(kept).index_add(0, sequence_ids, kept)
    return (total / count.clamp(min=1))[sequence_ids]


def _ratio(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """r [T], and where d was above MAX_LOG_RATIO."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp(), log_ratio > MAX_LOG_RATIO


def _clipped_surrogate(log_ratio: Tensor, tokens: _Tokens, clip_low: float, clip_high: float) -> TokenLoss:
    ratio, overflowed = _ratio(log_ratio)
    advantages = tokens.advantages
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    stopped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    return TokenLoss(loss, stopped | (overflowed & ~tokens.masked), tokens.masked)


def _weighted_logprob(tokens: _Tokens, lowest: float, highest: float) -> TokenLoss:
    ratio, overflowed = _ratio(tokens.log_ratio.detach())
    loss = -ratio.clamp(lowest, highest) * tokens.advantages * tokens.logprobs
    outside = (ratio < lowest) | (ratio > highest) | overflowed
    return TokenLoss(loss, outside & ~tokens.masked, tokens.masked)
